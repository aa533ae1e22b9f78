"""Lines of multiworld's loggers: their form, their fields, and what happens when nothing reads them."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

import multiworld
from multiworld.errors import MultiworldError
from multiworld.logs import handler
from multiworld.logs.source import about, logger

PATIENCE = 60


@pytest.fixture
def root():
    found = logging.getLogger("multiworld")
    before = found.level, found.propagate, list(found.handlers)
    yield found
    assert (found.level, found.propagate, found.handlers) == before


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_its_run_world_generation_and_rank(root, monkeypatch):
    monkeypatch.setenv("M8D_RUN_ID", "job7")
    stream = io.StringIO()
    end = multiworld.log_worlds("INFO", "json", stream)
    logger("multiworld.test.fields").info("world %r joins", "w", extra=about("w", 3, 1))
    logger("multiworld.test.fields").debug("too low")
    logger("multiworld.test.fields").warning("about none")
    end()
    end()
    first, second = lines(stream)
    assert first.pop("time")[4] == "-"
    assert first == {
        "program": "multiworld", "pid": os.getpid(), "level": "info", "logger": "multiworld.test.fields",
        "run": "job7", "world": "w", "generation": 3, "rank": 1, "message": "world 'w' joins",
    }  # fmt: skip
    assert "world" not in second


def test_a_line_for_which_there_is_no_thread_waits_for_the_next_one(root, monkeypatch, capsys):
    stream = io.StringIO()
    end = multiworld.log_worlds("INFO", stream=stream)
    with monkeypatch.context() as host:
        host.setattr(threading.Thread, "start", _refuse)
        logger("multiworld.test.refused").warning("first")
    logger("multiworld.test.refused").warning("second")
    end()
    assert [line.rpartition("message=")[2] for line in stream.getvalue().splitlines()] == ["first", "second"]
    assert capsys.readouterr().err == ""


def _refuse(_):
    raise RuntimeError("can't start new thread")


def test_tools_that_see_all_lines_of_a_program_see_these(monkeypatch):
    """They replace a method of logging's class, also after the logger was made."""
    log, seen = logger("multiworld.test.seen"), []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: seen.append(record.getMessage()))
    log.warning("line")
    assert seen == ["line"]


def test_text_is_one_line_also_of_a_traceback(root):
    stream = io.StringIO()
    end = multiworld.log_worlds("ERROR", stream=stream)
    try:
        int("two\nlines")
    except ValueError:
        logger("multiworld.test.text").exception("it failed")
    end()
    (line,) = stream.getvalue().splitlines()
    assert ' level=error logger=multiworld.test.text message="it failed" exception="Traceback' in line


def test_what_is_too_much_is_counted_for_every_handler(root, caplog):
    log = logger("multiworld.test.rate")
    with caplog.at_level("INFO", "multiworld"):
        for number in range(50):
            log.info("stranger %d", number, extra=about("a"))
        log.info("stranger elsewhere", extra=about("b"))
        for _ in range(50):
            log.info("from another line", extra=about("a"))
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "stranger" in text] == [f"stranger {number}" for number in range(10)] + [
        "stranger elsewhere"
    ]
    assert said.count("from another line") == 10


def test_changes_of_state_do_not_use_up_each_others_lines(root, caplog):
    log = logger("multiworld.test.kinds")
    with caplog.at_level("INFO", "multiworld"):
        for number in range(30):
            log.info("change", extra=about("a", kind=f"kind {number % 3}"))
    assert len(caplog.records) == 30


def test_lines_for_debugging_are_not_limited(root, caplog):
    with caplog.at_level("DEBUG", "multiworld"):
        for _ in range(50):
            logger("multiworld.test.debug").debug("again")
    assert len(caplog.records) == 50


def messages(stream):
    return [line["message"] for line in lines(stream)]


@pytest.mark.parametrize("first_ends", ["first", "last"])
def test_the_end_of_one_log_leaves_the_other_as_it_is(root, first_ends):
    log, one, two = logger("multiworld.test.several"), io.StringIO(), io.StringIO()
    first = multiworld.log_worlds("WARNING", "json", one)
    last = multiworld.log_worlds("INFO", "json", two)
    log.info("both")
    (first if first_ends == "first" else last)()
    log.info("low")
    log.warning("high")
    assert not root.propagate
    first()
    last()
    assert root.propagate
    log.warning("none")
    assert messages(one) == (["both"] if first_ends == "first" else ["both", "high"])
    assert messages(two) == (["both", "low", "high"] if first_ends == "first" else ["both"])


def test_what_the_program_configures_meanwhile_stays(root):
    before = root.level
    end, later = multiworld.log_worlds(stream=io.StringIO()), None
    try:
        (handler,) = root.handlers
        root.removeHandler(handler)
        root.propagate = True
        root.setLevel("ERROR")
        later = multiworld.log_worlds("DEBUG", stream=io.StringIO())
        end()
        assert (root.level, root.propagate) == (logging.DEBUG, False)
        later()
        assert (root.level, root.propagate) == (logging.ERROR, True)
    finally:
        root.setLevel(before)


@pytest.mark.parametrize(("level", "form"), [("LOUD", "text"), ("INFO", "xml"), ("", "text")])
def test_unknown_values_are_refused(root, level, form):
    with pytest.raises(MultiworldError, match="It is one of"):
        multiworld.log_worlds(level, form)


def test_a_pipe_that_nothing_reads_holds_up_no_caller(root):
    reading, writing = os.pipe()
    came = []
    with os.fdopen(reading) as source, os.fdopen(writing, "w") as stream:
        end = multiworld.log_worlds("DEBUG", "json", stream)
        log = logger("multiworld.test.blocked")

        def talk():
            for number in range(21_000):  # more than a pipe holds, the thread has taken, and may wait
                log.debug("%d %s", number, "x" * 100)

        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        talking.join(120.0)
        assert not talking.is_alive()
        drain = threading.Thread(target=lambda: came.extend(source), daemon=True)
        drain.start()
        log.debug("last")
        end()
        stream.close()
        drain.join(60.0)
    said = [json.loads(line)["message"] for line in came]
    assert said[0].startswith("0 x")
    assert any("lines were left out" in message for message in said)


PROGRAM = """
import logging, logging.config, os, sys, threading, time
from multiworld.logs.handler import from_environment, log_worlds
from multiworld.logs.source import logger
{before}
from_environment()
from_environment()
log = logger("multiworld.test")
log.info("one")
log.warning("two")
if "ends" in sys.argv:
    end()
    log.info("three")
    log.warning("four")
if "argument" in sys.argv:
    end = log_worlds("WARNING", "json", sys.stdout)
    log.info("no line")
    log.warning("of stdout")
    end()
    log.warning("three")
if "configure" in sys.argv:
    for text in ("three", "four"):
        logging.config.dictConfig({{"version": 1, "disable_existing_loggers": False}})
        log.warning(text)
if "locked" in sys.argv:  # other threads hold the locks of the log at the fork
    from multiworld.logs.source import _LIMITED
    def hold(lock):
        with lock:
            held.release()
            threading.Event().wait(300)
    held = threading.Semaphore(0)
    writer = logging.getLogger("multiworld").handlers[0]._writer
    writer.flush(30)
    for lock in (writer._ready, _LIMITED._lock):
        threading.Thread(target=hold, args=(lock,), daemon=True).start()
        held.acquire()
    child = os.fork()
    if child == 0:
        if "talks" in sys.argv:
            for _ in range(30):
                log.warning("child")
        sys.exit()
    until = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, 9)
            print('{{"message": "the child did not end"}}', file=sys.stderr)
            break
        time.sleep(0.01)
    os._exit(0)  # its own lock is held, too
if "fork" in sys.argv:
    if os.fork() == 0:
        log.warning("child")
        logging.shutdown()
        sys.exit()
    os.wait()
"""


def said(before="", *args, **environment):
    program = PROGRAM.format(before=before)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("M8D_", "TORCHELASTIC"))}
    done = subprocess.run(
        [sys.executable, "-c", program, *args], env={**kept, **environment}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.stderr.splitlines()


def test_without_settings_logging_is_as_the_program_has_it():
    assert said() == ["two"]
    assert said("logging.basicConfig(level='INFO', format='mine %(message)s')") == ["mine one", "mine two"]


def test_the_level_of_the_environment():
    assert [line.rpartition("message=")[2] for line in said(M8D_LOG_LEVEL="info")] == ["one", "two"]
    assert said(M8D_LOG_LEVEL="ERROR") == []
    assert said(M8D_LOG_LEVEL="OFF") == []
    basic = "logging.basicConfig(level='INFO', format='mine %(message)s')"
    assert said(basic, M8D_LOG_LEVEL="WARNING") == ["mine two"]


def test_the_format_of_the_environment_takes_the_place_of_the_programs():
    basic = "logging.basicConfig(level='INFO', format='mine %(message)s')"
    found = [json.loads(line) for line in said(basic, M8D_LOG_FORMAT="json")]
    assert [each["message"] for each in found] == ["one", "two"]


def test_lines_go_on_after_the_program_configures_its_logging():
    found = [json.loads(line) for line in said("", "configure", M8D_LOG_FORMAT="json")]
    assert [each["message"] for each in found] == ["one", "two", "three", "four"]


def test_a_forked_child_has_lines_of_its_own():
    found = [json.loads(line) for line in said("", "fork", M8D_LOG_FORMAT="json")]
    assert sorted(each["message"] for each in found) == ["child", "one", "two"]
    assert len({each["pid"] for each in found}) == 2


def test_the_environment_holds_when_the_programs_log_has_ended():
    call = "end = log_worlds('WARNING', 'json', sys.stdout)"
    found = [json.loads(line)["message"] for line in said(call, "ends", M8D_LOG_FORMAT="json")]
    assert found == ["three", "four"]
    assert said(call, "ends", M8D_LOG_LEVEL="ERROR") == []
    basic = f"logging.basicConfig(format='mine %(message)s'); {call}"
    assert said(basic, "ends", M8D_LOG_LEVEL="INFO") == ["mine three", "mine four"]


def test_the_environment_gives_way_to_the_programs_log():
    found = [json.loads(line)["message"] for line in said("", "argument", M8D_LOG_FORMAT="json")]
    assert found == ["one", "two", "three"]


@pytest.mark.parametrize(("talks", "lines_of_it"), [("quiet", 0), ("talks", 10)])
def test_a_child_that_is_forked_while_a_thread_logs_ends_and_limits_its_lines(talks, lines_of_it):
    found = [json.loads(line)["message"] for line in said("", "locked", talks, M8D_LOG_FORMAT="json")]
    assert found == ["one", "two"] + ["child"] * lines_of_it


@pytest.mark.parametrize(("name", "value"), [("M8D_LOG_LEVEL", "LOUD"), ("M8D_LOG_FORMAT", "xml")])
def test_a_wrong_setting_is_an_error(name, value):
    assert f"{name}='{value}'. It is one of" in said(**{name: value})[-1]


@pytest.mark.parametrize("holder", [handler._attachments, handler.from_environment])
def test_a_child_that_is_forked_while_another_thread_attaches_logs(root, monkeypatch, holder):
    monkeypatch.setattr(handler.from_environment, "_done", False)
    multiworld.log_worlds(stream=io.StringIO())()
    held, over = threading.Event(), threading.Event()

    def hold():
        with holder._lock:
            held.set()
            over.wait(PATIENCE)

    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(PATIENCE)
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE)
        code = 1
        try:
            handler.from_environment()
            multiworld.log_worlds(stream=io.StringIO())
            code = 0
        finally:
            os._exit(code)
    over.set()
    holding.join(PATIENCE)
    assert os.waitpid(pid, 0) == (pid, 0)
