"""The log of a run: one line for each event, as ``key=value`` text or as JSON.

    2026-11-22T01:02:03.456+00:00 m8d-run worker=3 role=worker:2 pid=4711 attempt=0 level=warning event=failed
        exitcode=-9 message="killed by SIGKILL"

(one line, broken here). The page "What a run shows" has the grammar and every event's keys.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

from multiworld.logs.lines import as_json, as_text, local_time
from multiworld.logs.writer import LineWriter
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
from multiworld.run.view.handler_streams import WriterStream, handlers_to
from multiworld.run.view.log_filter import LogFilter
from multiworld.run.view.messages import ending, level_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Literal, TextIO

    from multiworld.run.events import RunEvent

__all__ = ["EventLog"]

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
_CLOSE_TIMEOUT = 5.0


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
        self._stream = stream
        self._writer = LineWriter(stream, functools.partial(_lost, self._form), name="m8d-run-log")
        # The finalizer runs at the interpreter's exit too, so that no line is lost without `close`.
        self._finish = weakref.finalize(self, LineWriter.close, self._writer, _CLOSE_TIMEOUT)

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

    def say(self, text: str) -> None:
        """Write lines that are no event's."""
        with contextlib.suppress(RuntimeError):  # no thread is left for them
            self._writer.put(text + "\n")

    @contextlib.contextmanager
    def with_handlers(self, later: Iterable[logging.Handler] = ()) -> Iterator[None]:
        """Lead logging's handlers that write to the same descriptor here: they hold up no caller either.

        torch's agent logs in the launcher's main thread, before it ends the workers for instance.

        Args:
            later: handlers that no logger has yet.
        """
        try:
            fd = self._stream.fileno()
        except (AttributeError, OSError, ValueError):  # standard error is closed, or it is no file
            yield
            return
        with handlers_to(fd, WriterStream(self._writer, self._stream), later):
            yield

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
        fields: dict[str, Any] = {"time": local_time(found.pop("at")), "program": PROGRAM}
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


def _lost(form: Callable[[dict[str, Any]], str], number: int) -> str:
    now = local_time(time.time())
    return form({"time": now, "program": PROGRAM, "level": "warning", "event": "lines-lost", "lines": number})
