"""Lines of a thread that must not wait for the log's handlers."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import pytest

from multiworld.logs import aside, writer
from multiworld.logs.source import logger

PATIENCE = 120.0


class Handler(logging.Handler):
    """Keeps lines; `go` lets it write them, and `begun` is set when it has one."""

    def __init__(self):
        super().__init__()
        self.lines, self.go, self.begun = [], threading.Event(), threading.Event()

    def emit(self, record):
        self.begun.set()
        assert self.go.wait(PATIENCE)
        self.lines.append(record.getMessage())


@pytest.fixture
def handler():
    made, root = Handler(), logging.getLogger("multiworld")
    root.addHandler(made)
    yield made
    made.go.set()
    until(lambda: aside._lines()._thread is None)
    root.removeHandler(made)


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_a_thread(what):
    def run():
        aside.never_wait()
        what()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_handler_that_blocks_holds_up_no_thread_that_must_not_wait(handler):
    log = logger("multiworld.test.aside")
    in_a_thread(lambda: [log.warning("line %d", number) for number in range(3)])
    assert handler.begun.wait(PATIENCE)
    assert handler.lines == []
    handler.go.set()
    until(lambda: handler.lines == ["line 0", "line 1", "line 2"])
    until(lambda: not [each for each in threading.enumerate() if each.name == "m8d-log-aside"])
    in_a_thread(lambda: log.warning("again"))
    until(lambda: handler.lines[3:] == ["again"])


def test_other_threads_hand_their_lines_over_themselves(handler):
    handler.go.set()
    logger("multiworld.test.aside.here").warning("here")
    assert handler.lines == ["here"]


def test_what_finds_no_room_is_counted(handler, monkeypatch):
    monkeypatch.setattr(writer, "_MOST_WAITING", 2)
    log = logger("multiworld.test.aside.many")

    def many():
        log.warning("first")
        assert handler.begun.wait(PATIENCE)
        for number in range(5):
            log.warning("line %d", number)

    in_a_thread(many)
    handler.go.set()
    until(lambda: len(handler.lines) == 4)
    assert handler.lines[:3] == ["first", "line 0", "line 1"]
    assert "3 lines were left out" in handler.lines[3]


def test_a_handler_that_fails_ends_nothing(handler, capsys):
    handler.go.set()
    log = logger("multiworld.test.aside.failing")
    in_a_thread(lambda: [log.warning("%d", "no number"), log.warning("the next")])
    until(lambda: handler.lines == ["the next"])
    assert "no number" in capsys.readouterr().err


PROGRAM = """
import threading, time
from multiworld.logs import aside
from multiworld.logs.source import logger

def run():
    aside.never_wait()
    logger("multiworld.test").warning("written at the end")

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_lines_are_written_before_the_program_ends():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "written at the end\n")


def test_without_a_thread_a_line_waits_for_the_next_one(handler, monkeypatch):
    handler.go.set()
    log = logger("multiworld.test.aside.threads")

    def none(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(writer.threading.Thread, "start", none)
        aside._here.never_waits = True
        try:
            log.warning("first")
        finally:
            aside._here.never_waits = False
    in_a_thread(lambda: log.warning("second"))
    until(lambda: handler.lines == ["first", "second"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_a_handler_ends_is_followed_by_another(handler, monkeypatch):
    handler.go.set()
    log, emit = logger("multiworld.test.aside.ended"), handler.emit

    def ends(record):
        if record.getMessage() == "ends it":
            raise SystemExit
        emit(record)

    monkeypatch.setattr(handler, "emit", ends)
    in_a_thread(lambda: log.warning("ends it"))
    until(lambda: aside._lines()._thread is None)
    in_a_thread(lambda: log.warning("the next"))
    until(lambda: handler.lines == ["the next"])


def test_what_subscribers_and_settings_log_is_handed_over_too(handler):
    in_a_thread(
        lambda: [logging.getLogger(f"multiworld.{each}").warning("line") for each in ("events", "settings")]
    )
    assert handler.lines == []
    handler.go.set()
    aside.flush(PATIENCE)
    assert handler.lines == ["line", "line"]
