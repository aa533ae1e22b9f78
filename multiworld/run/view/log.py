"""The log of a run: one line for each event, as ``key=value`` text or as JSON.

    2026-11-22T01:02:03.456+00:00 m8d-run worker=3 role=worker:2 pid=4711 attempt=0 level=warning event=failed
        exitcode=-9 message="killed by SIGKILL"

(one line, broken here). The page "What a run shows" has the grammar and every event's keys.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import weakref
from collections import deque
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from multiworld.run.events import (
    CallsRaised,
    NodeJoined,
    NodeLost,
    Note,
    RunEnded,
    RunStarted,
    SlotTaken,
    StateProgress,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarting,
    WorkerRetiring,
    WorkerStarted,
    WorkerStopped,
    WorldChanged,
)
from multiworld.run.view.log_filter import LogFilter
from multiworld.run.view.messages import ending, level_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TextIO

    from multiworld.run.events import RunEvent

__all__ = ["EventLog", "as_json", "as_text"]

_log = logging.getLogger(__name__)

PROGRAM = "m8d-run"

_EVENTS: dict[type[RunEvent], str] = {
    RunStarted: "run-started",
    SlotTaken: "seat",
    WorkerStarted: "started",
    WorkerFailed: "failed",
    WorkerRestarting: "restarting",
    WorkerRetiring: "retiring",
    WorkerEnded: "ended",
    WorkerStopped: "stopped",
    WorldChanged: "world",
    NodeJoined: "node-joined",
    NodeLost: "node-lost",
    Note: "note",
    RunEnded: "run-ended",
}
_KEYS = {"run_id": "run", "slot": "seat", "text": "message"}
"""Fields of events whose key in the log is another word."""

_SUBJECT = ("at", "rank", "role", "role_rank", "pid", "attempt", "level", "stdout", "stderr")
_BARE = re.compile(r"(?!-$)[^\s\"=\\]+")
_MOST_WAITING = 10_000
_CLOSE_TIMEOUT = 5.0
_IDLE = 60.0


class EventLog:
    """A subscriber that writes a line for each event, and never blocks its caller.

    A thread of its own writes: a paused terminal (Ctrl-S) or a full pipe does not hold up the launcher. Lines
    that find no room meanwhile are counted, and the count is written later. After a broken pipe or a closed
    file the rest is left out.

    Args:
        stream: to write to; each line is flushed.
        form: "text" or "json".
        verbose: whether all events have a line, not only those that `multiworld.run.view.log_filter` picks.
    """

    def __init__(
        self, stream: TextIO, form: Literal["text", "json"] = "text", *, verbose: bool = True
    ) -> None:
        self._verbose = verbose
        self._filter = LogFilter()
        self._form = as_json if form == "json" else as_text
        self._known: dict[int, dict[str, Any]] = {}
        self._writer = _Writer(stream, self._form)
        # The finalizer runs at the interpreter's exit too, so that no line is lost without `close`.
        self._finish = weakref.finalize(self, _Writer.close, self._writer, _CLOSE_TIMEOUT)

    def __call__(self, event: RunEvent) -> None:
        """Write a line for `event`; none for what is only shown by the views."""
        if isinstance(event, StateProgress | CallsRaised):
            return
        fields = self._fields(event)
        picked = self._filter.picks(event)
        if isinstance(event, RunEnded):
            fields |= self._filter.summary(event.at)
        if picked or self._verbose:
            self._writer.put(self._form(fields) + "\n")

    def close(self) -> None:
        """Write the waiting lines, for at most 5 seconds; later events are left out. Harmless twice."""
        self._finish()

    def _fields(self, event: RunEvent) -> dict[str, Any]:
        found = dict(vars(event))
        rank = found.get("rank")
        if isinstance(event, WorkerStarted):
            self._known[event.rank] = {key: found[key] for key in ("role", "role_rank", "pid", "attempt")}
        if isinstance(rank, int):
            # A world's change or a restart has only the rank: it is about the process that was started last.
            found = {**self._known.get(rank, {}), **found}
        fields: dict[str, Any] = {"time": _time(found.pop("at")), "program": PROGRAM}
        if rank is not None:
            fields["worker"] = rank
        if "role" in found:
            fields["role"] = f"{found['role']}:{found['role_rank']}"
        fields |= {key: found[key] for key in ("pid", "attempt") if key in found}
        fields["level"] = logging.getLevelName(level_of(event)).lower()
        fields["event"] = _EVENTS.get(type(event), type(event).__name__)
        if isinstance(event, WorldChanged) and not event.sizes:
            del found["size"], found["sizes"]
        if not found.get("ranks", True):
            del found["ranks"]
        for key, value in found.items():
            if key not in _SUBJECT:
                fields[_KEYS.get(key, key)] = list(value) if isinstance(value, tuple) else value
        if isinstance(event, (WorkerFailed, WorkerStopped)) and not found.get("message"):
            fields["message"] = ending(event.exitcode)
        return fields


class _Writer:
    def __init__(self, stream: TextIO, form: Callable[[dict[str, Any]], str]) -> None:
        self._stream = stream
        self._form = form
        self._ready = threading.Condition()
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        with self._ready:
            if self._closed:
                return
            if len(self._lines) >= _MOST_WAITING:
                self._dropped += 1
                return
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="m8d-run-log", daemon=True)
                self._thread.start()
            self._ready.notify()

    def close(self, timeout: float) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _write(self) -> None:
        while True:
            with self._ready:
                while not self._lines and not self._closed:
                    self._ready.wait(_IDLE)
                lines, dropped = list(self._lines), self._dropped
                self._lines.clear()
                self._dropped = 0
                if not lines:
                    return
            if dropped:
                lost = {"level": "warning", "event": "lines-lost", "lines": dropped}
                lines.append(self._form({"time": _time(time.time()), "program": PROGRAM, **lost}) + "\n")
            if not self._written(lines):
                with self._ready:
                    self._closed = True
                    self._lines.clear()
                return

    def _written(self, lines: list[str]) -> bool:
        for line in lines:
            try:
                self._stream.write(line)
                self._stream.flush()
            except BlockingIOError:  # noqa: PERF203  (each line has its own fate)
                with self._ready:
                    self._dropped += 1
            except (OSError, ValueError) as error:
                _log.debug("the log cannot be written any more: %s", error)
                return False
        return True


def as_json(fields: dict[str, Any]) -> str:
    """Return a line's fields as a JSON object of one line."""
    return json.dumps(fields)


def as_text(fields: dict[str, Any]) -> str:
    """Return a line's fields as text: time, program, then ``key=value`` in the fields' order."""
    rest = (f"{key}={_value(value)}" for key, value in fields.items() if key not in {"time", "program"})
    return " ".join((fields["time"], fields["program"], *rest))


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        value = ",".join(str(each) for each in value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, int) or (_BARE.fullmatch(text) and text.isprintable()):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    # Characters that do not print, some of which end a line for some readers, are escaped as in JSON.
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in quoted)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).astimezone().isoformat(timespec="milliseconds")
