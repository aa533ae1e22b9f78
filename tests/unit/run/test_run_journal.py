"""The log of a run: a grammar that reads back, and a listener that nothing it writes to can hold up."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import threading
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.runstatekit import ANYTHING, AT, begun, killed, run_of

from multiworld.logs.lines import as_json, as_text
from multiworld.logs.writer import LineWriter
from multiworld.run import events as h
from multiworld.run.view.handler_streams import WriterStream
from multiworld.run.view.log import EventLog
from multiworld.run.view.log_filter import LogFilter

PAGE = (Path(__file__).parents[3] / "docs" / "run-output.md").read_text(encoding="utf-8")
# The grammar of the page "What a run shows".
PAIR = re.compile(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"=\\]+)')


BEGAN = (
    "level=info event=run-started run=job7 restart=worker max_restarts=3 entrypoint=train.py node=alpha "
    "secure=False"
)


def read(line: str) -> dict:
    """Read a line of text as the docs say it is written."""
    stamp, program, rest = re.fullmatch(r"(\S+) (\S+)((?: .*)?)", line).groups()
    found = {"time": stamp, "program": program}
    assert "".join(match.group() for match in PAIR.finditer(rest)) == rest, line
    for key, value in PAIR.findall(rest):
        assert key not in found
        found[key] = None if value == "-" else json.loads(value) if value[0] == '"' else value
    return found


def written(*told: h.RunEvent, form: str = "text") -> list[str]:
    stream = io.StringIO()
    event_log = EventLog(stream, form)
    for each in told:
        event_log(each)
    event_log.close()
    return stream.getvalue().split("\n")[:-1]


def test_a_line_of_each_kind():
    lines = written(
        *begun(0), h.WorkerStarted(AT, 3, "worker", 2, 3, 4711, 0), *killed(3)[1:3],
        h.WorkerFailed(AT, 3, 4711, 0, -9, ""), h.WorkerStopped(AT, 3, 4711, None), h.WorkerEnded(AT, 0, 4000),
        h.SlotTaken(AT, None, 2), h.NodeJoined(AT, "beta", None), h.NodeLost(AT, "beta", 1, "hung", ("w1", "w 2")),
        h.Note(AT, 30, 'say "this" = \u2028\n\x1b[1m'), h.RunEnded(AT, 3, ""),
    )  # fmt: skip
    told = [line.split(" m8d-run ", 1) for line in lines]
    assert all(datetime.fromisoformat(stamp).timestamp() in {AT, AT + 100, AT + 100.1} for stamp, _ in told)
    assert [rest for _, rest in told] == [
        BEGAN,
        "level=info event=seat seat=0 nodes=1",
        "worker=0 role=hub:0 pid=4000 attempt=0 level=info event=started local_rank=0",
        "worker=3 role=worker:2 pid=4711 attempt=0 level=info event=started local_rank=3",
        "worker=3 role=worker:2 pid=4711 attempt=1 level=info event=restarting delay=0 left=2",
        ('worker=0 role=hub:0 pid=4000 attempt=0 level=warning event=world world=w2 state=broken generation=1'
        ' detail="rank 1 crashed: connection reset by peer" cause=crashed'),
        ('worker=3 role=worker:2 pid=4711 attempt=0 level=warning event=failed exitcode=-9'
        ' message="killed by SIGKILL"'),
        ('worker=3 role=worker:2 pid=4711 attempt=0 level=info event=stopped exitcode=-'
        ' message="exit code not known"'),
        "worker=0 role=hub:0 pid=4000 attempt=0 level=info event=ended",
        "level=info event=seat seat=- nodes=2",
        "level=info event=node-joined node=beta seat=-",
        'level=warning event=node-lost node=beta seat=1 cause=hung worlds="w1,w 2"',
        'level=warning event=note message="say \\"this\\" = \\u2028\\n\\u001b[1m"',
        ('level=error event=run-ended exitcode=3 reason="" seconds=0 workers=2 failures=1 restarts=1'
        ' worlds_broken=1'),
    ]  # fmt: skip


def test_a_log_that_is_not_verbose_has_what_people_have_to_know():
    """A hub and 8 workers, one of which is killed: 116 lines before, worlds that are joined most of them."""
    stream = io.StringIO()
    event_log = EventLog(stream, verbose=False)
    ends = [h.WorkerEnded(AT + 120, rank, 4000 + rank) for rank in range(9)]
    left = [h.WorldChanged(AT + 119, rank, "w0", "broken", 1, "rank 0 left", "left") for rank in (0, 1)]
    late = [h.WorldChanged(AT + 100.2, 3, "w2", "broken", 1, "the same, of another member", "crashed")]
    trouble = killed(3)
    for each in (*begun(8), *trouble[:3], *late, *trouble[3:], *left, *ends, h.RunEnded(AT + 120, 0, "")):
        event_log(each)
    event_log.close()
    lines = [read(line) for line in stream.getvalue().split("\n")[:-1]]
    events = [line["event"] for line in lines]
    assert events == [
        "run-started",
        *["started"] * 9,
        "failed",
        "restarting",
        "world",
        "started",
        "world",
        "run-ended",
    ]
    assert [(line["world"], line["state"]) for line in lines if line["event"] == "world"] == [
        ("w2", "broken"), ("w2", "active"),
    ]  # fmt: skip
    summary = {key: lines[-1][key] for key in ("seconds", "workers", "failures", "restarts", "worlds_broken")}
    assert summary == {
        "seconds": "120",
        "workers": "9",
        "failures": "1",
        "restarts": "1",
        "worlds_broken": "1",
    }


def anew(at, generation=1):
    """Both members of world "w" are started again, and join it at a store that knows nothing of it."""
    return [
        *(h.WorkerStarted(at, rank, "worker", rank, rank, 5000 + rank, 1) for rank in range(2)),
        *(h.WorldChanged(at + 1, rank, "w", "active", generation, size=2) for rank in range(2)),
    ]


def lost(at, generation=1):
    return [
        h.WorldChanged(at + rank / 9, rank, "w", "broken", generation, "lost", "crashed") for rank in (0, 1)
    ]


def test_a_world_whose_numbers_begin_anew_is_told_again():
    log_filter = LogFilter()
    told = [
        log_filter.picks(each)
        for each in (*anew(AT), *lost(AT + 2), *anew(AT + 4), *lost(AT + 6), *anew(AT + 8))
    ]
    begins, breaks, heals = [True, True, False, False], [True, False], [True, True, True, False]
    assert told == [*begins, *breaks, *heals, *breaks, *heals]
    assert log_filter.summary(AT)["worlds_broken"] == 2
    state = run_of(*anew(AT), *lost(AT + 2), *anew(AT + 4), *lost(AT + 6))
    assert state.snapshot()["totals"]["broken"] == {"crashed": 2}
    assert [each["over"] for each in state.snapshot()["faults"]] == [False, True]


def test_a_member_that_says_late_that_it_was_active_begins_nothing_anew():
    log_filter = LogFilter()
    begun, (first, second) = anew(AT), lost(AT + 2)
    assert [log_filter.picks(each) for each in (*begun[:3], first, begun[3], second)][2:] == [
        False,
        True,
        False,
        False,
    ]


def test_a_retired_worker_has_a_line_when_it_has_left():
    log_filter = LogFilter()
    told = [
        *(retiring := [h.WorkerRetiring(AT, 0, 60.0), h.WorkerRetiring(AT, 1, 60.0)]),
        h.WorkerEnded(AT + 1, 0, 4000),
        h.WorkerStopped(AT + 1, 1, 4001, -15),
        h.WorkerEnded(AT + 1, 2, 4002),
        *begun(0),
        h.WorkerEnded(AT + 3, 0, 4003),
    ]
    picked = {each: log_filter.picks(each) for each in told}
    assert [picked[each] for each in (*retiring, *told[2:5], told[-1])] == [True] * 4 + [False] * 2


def test_worlds_that_break_once_are_forgotten():
    log_filter = LogFilter()
    for number in range(2000):
        log_filter.picks(h.WorldChanged(AT, 0, f"w{number}", "broken", 1, "lost", "crashed"))
    assert len(log_filter._told) == len(log_filter._renumbering._broken) == 512


@given(st.lists(ANYTHING, max_size=60))
def test_what_is_left_out_of_the_short_log_is_no_failure(told):
    log_filter = LogFilter()
    for each in told:
        picked = log_filter.picks(each)
        assert picked or isinstance(each, (h.SlotTaken, h.WorkerEnded, h.WorkerStopped, h.WorldChanged))
    summary = log_filter.summary(AT)
    assert summary["failures"] == sum(isinstance(each, h.WorkerFailed) for each in told)
    assert all(value >= 0 for value in summary.values())


def test_json_has_the_same_keys_and_keeps_types():
    told = [
        *begun(1),
        *killed(1),
        h.NodeLost(AT, "beta", None, "hung", ("w1", "w 2")),
        h.RunEnded(AT, 0, "done"),
    ]
    text, data = written(*told), [json.loads(line) for line in written(*told, form="json")]
    assert [list(read(line)) for line in text] == [list(each) for each in data]
    assert data[-2]["worlds"] == ["w1", "w 2"]
    assert data[-2]["seat"] is None
    assert data[-1]["exitcode"] == 0


@given(told=st.lists(ANYTHING, max_size=10))
def test_whatever_happens_each_line_is_one_line_and_reads_back(told):
    text, data = written(*told), written(*told, form="json")
    assert (
        len(text) == len(data) == sum(not isinstance(each, h.StateProgress | h.CallsRaised) for each in told)
    )
    for line, other in zip(text, data, strict=True):
        assert line.isprintable()
        assert other.isprintable()
        fields, parsed = json.loads(other), read(line)
        assert list(parsed) == list(fields)
        for key, value in fields.items():
            if isinstance(value, list):
                assert parsed[key] == ",".join(value)
            elif isinstance(value, float):
                assert float(parsed[key]) == pytest.approx(value, rel=1e-5)
            else:
                assert parsed[key] == (None if value is None else str(value))


@given(
    fields=st.dictionaries(
        st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.text() | st.none() | st.integers()
    )
)
def test_any_text_survives_the_grammar(fields):
    fields = {key: value for key, value in fields.items() if key not in {"time", "program"}}
    line = as_text({"time": "2026-11-22T01:02:03.456+00:00", "program": "m8d-run", **fields})
    expected = {key: None if value is None else str(value) for key, value in fields.items()}
    assert {k: v for k, v in read(line).items() if k not in {"time", "program"}} == expected
    assert json.loads(as_json(fields)) == fields


@pytest.mark.parametrize("how", ["pipe", "closed", "failing"])
def test_where_nobody_reads_any_more_the_launcher_goes_on(how):
    tried: list[str] = []
    if how == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w")
    else:

        class Odd(io.StringIO):
            def write(self, text: str) -> int:
                tried.append(text)
                if how == "failing":
                    raise OSError(errno.EIO, "the terminal is gone")
                return super().write(text)

        stream = Odd()
        if how == "closed":
            stream.close()
    event_log = EventLog(stream)
    for each in begun():
        event_log(each)
    event_log.close()
    event_log(h.Note(AT, 20, "after the end"))
    event_log.close()
    if how == "pipe":
        with pytest.raises(BrokenPipeError):
            stream.close()
    else:
        assert len(tried) == 1  # nor was it tried again


def test_a_reader_that_stands_still_holds_nobody_up_and_what_was_lost_is_said():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        event_log = EventLog(stream, "json")
        for at in range(30_000):  # the pipe holds 64 KiB, the log 10,000 lines
            event_log(h.Note(AT, 20, f"note {at}"))
        seen = lost = 0
        with os.fdopen(reader) as lines:
            while seen + lost < 30_000:  # lines may be lost more than once, where the log's thread is slow
                line = json.loads(lines.readline())
                if line["event"] == "lines-lost":
                    assert line["level"] == "warning"
                    lost += line["lines"]
                else:
                    assert line["message"] == f"note {seen + lost}"
                    seen += 1
        event_log.close()
    assert lost > 0
    assert seen >= 10_000


class Looking(logging.Handler):
    """As torch 2.15's: it looks for its stream at each line, and has none that can be set."""

    def __init__(self, stream):
        super().__init__(logging.INFO)
        self._found = stream

    @property
    def stream(self):
        return self._found

    def emit(self, record):
        self.stream.write(self.format(record) + "\n")
        self.stream.flush()


@pytest.mark.parametrize("kind", [logging.StreamHandler, Looking])
def test_a_reader_that_stands_still_holds_up_no_logger_of_torch(kind):
    """torch's agent logs in the launcher's main thread before it ends the workers."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with os.fdopen(reader) as lines, os.fdopen(writer, "w") as stream:
        event_log = EventLog(stream)
        handler = kind(stream)
        handler.setFormatter(logging.Formatter("said: %(message)s"))
        handler.addFilter(lambda record: "left out" not in record.msg)
        logger = logging.getLogger("test_run_journal")
        logger.addHandler(handler)

        def tells() -> None:
            with event_log.with_handlers():
                logger.warning("left out")
                logger.warning("Received a death signal")
            event_log.say("rank 0 failed")

        teller = threading.Thread(target=tells, daemon=True)
        try:
            teller.start()
            teller.join(10)
            waited = teller.is_alive()
            assert lines.read(filled) == "x" * filled
            teller.join(30)
            event_log.close()
            assert not waited
            told = [lines.readline() for _ in range(2)]
            assert (logger.handlers, handler.stream) == ([handler], stream), "as it was before"
        finally:
            logger.removeHandler(handler)
        assert told == ["said: Received a death signal\n", "rank 0 failed\n"]


def test_a_forked_child_writes_its_handlers_lines_itself():
    """The thread that writes is the launcher's."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as lines, os.fdopen(writer, "w") as stream:
        stream_of_log = WriterStream(LineWriter(stream, str, name="m8d-run-log"), stream)
        stream_of_log._pid = -1  # as in a child
        stream_of_log.write("a worker's\n")
        assert lines.readline() == "a worker's\n"


@pytest.mark.parametrize("state", ["broken", "failed"])
@pytest.mark.parametrize(("cause", "level"), [("crashed", "warning"), ("", "warning"), ("left", "info")])
def test_a_member_that_left_in_good_order_is_no_warning(state, cause, level):
    (line,) = written(h.WorldChanged(AT, 0, "w", state, 1, "", cause), form="json")
    assert (json.loads(line)["level"], json.loads(line)["cause"]) == (level, cause)


def test_lines_are_written_at_once():
    reader, writer = os.pipe()
    with os.fdopen(reader) as lines, os.fdopen(writer, "w") as stream:
        event_log = EventLog(stream)
        event_log(h.RunEnded(AT, 0, "done"))
        assert "event=run-ended exitcode=0 reason=done" in lines.readline()  # pytest-timeout ends what hangs
        event_log.close()


def test_nothing_is_lost_when_the_process_ends_without_closing_it(tmp_path):
    import subprocess
    import sys

    script = (
        "import sys\nfrom multiworld.run.view.log import EventLog\nfrom multiworld.run.events import Note\n"
        "event_log = EventLog(sys.stderr)\nfor at in range(500): event_log(Note(1.0, 20, f'note {at}'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert [read(line)["message"] for line in done.stderr.splitlines()] == [f"note {at}" for at in range(500)]


def test_the_page_has_every_event_with_its_keys():
    told = [
        *begun(0), h.SlotTaken(AT, 0, 1), *killed(0), h.WorkerEnded(AT, 0, 4000), h.WorkerStopped(AT, 0, 4000, 0),
        h.NodeJoined(AT, "beta", 1), h.NodeLost(AT, "beta", 1, "hung", ()), h.Note(AT, 20, "x"),
        h.WorldChanged(AT, 0, "w", "active", 1, size=2, sizes="1:2", ranks=(0,)), h.WorkerRetiring(AT, 0, 60.0), h.RunEnded(AT, 0, ""),
    ]  # fmt: skip
    common = {"time", "program", "worker", "role", "pid", "attempt", "level", "event"}
    seen = {fields["event"]: set(fields) - common for fields in map(json.loads, written(*told, form="json"))}
    rows = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| `[a-z-]+` \|[^|]*\| ", line)]
    said = {
        row[0].strip("|` "): {key for key in re.findall(r"`([a-z_]+)`", row[1]) if key != "null"}
        for row in rows
        if row[0].strip("|` ") not in {*common, "role"}
    }
    assert said.pop("lines-lost") == {"lines"}
    assert {event: keys for event, keys in said.items() if event in seen} == seen


def test_the_lines_of_the_page_are_of_the_grammar():
    lines = [line for line in PAGE.splitlines() if " m8d-run " in line and line.startswith("20")]
    assert [read(line)["event"] for line in lines] == [
        "failed", "restarting", "started", "world", "run-ended",
    ]  # fmt: skip
