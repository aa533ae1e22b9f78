"""`log_worlds` and `from_environment`: write the lines of multiworld's loggers to a stream.

A thread of its own writes: a terminal that is paused, or a full pipe, would else hold up the watchdog, and
others would take this process for hung.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TextIO, cast

from multiworld import settings
from multiworld.errors import MultiworldError
from multiworld.logs import aside
from multiworld.logs.lines import as_json, as_text, local_time
from multiworld.logs.source import FIELDS
from multiworld.logs.writer import LineWriter

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LEVELS", "LineHandler", "attach", "from_environment", "level_named", "log_worlds"]

LEVELS = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "OFF": logging.CRITICAL + 1,
}
"""Levels by the names that M8D_LOG_LEVEL has for them."""

_FORMS = {"text": as_text, "json": as_json}
_ROOT = "multiworld"
_CLOSE_TIMEOUT = 2.0


class LineHandler(logging.Handler):
    """A handler of logging that writes one line for each record, and never blocks.

    Args:
        stream: to write to; None: standard error, as it is when a line is written.
        form: "text" (``key=value``) or "json".
    """

    def __init__(self, stream: TextIO | None, form: str) -> None:
        super().__init__()
        self._stream = stream
        self._form = _FORMS[form]
        self._pid = os.getpid()
        self._closed = False
        self._writer = self._new_writer()

    def _new_writer(self) -> LineWriter:
        stream = cast("TextIO", _StandardError()) if self._stream is None else self._stream
        lost = functools.partial(_lost, self._form)
        writer = LineWriter(stream, lost, name="m8d-log")
        # At the interpreter's exit what waits is written.
        self._finish = weakref.finalize(self, _close, writer, os.getpid())
        return writer

    def emit(self, record: logging.LogRecord) -> None:
        """Have the record's line written."""
        try:
            # In a forked child the thread is the parent's. And logging.config closes all handlers that exist,
            # also those that stay on their loggers: the next line has another thread.
            if os.getpid() != self._pid or self._closed:
                self._finish.detach()
                self._closed = False
                self._pid, self._writer = os.getpid(), self._new_writer()
            self._writer.put(self._form(self._fields(record)) + "\n")
        except Exception:  # noqa: BLE001  (as logging's own handlers do)
            self.handleError(record)

    def close(self) -> None:
        """Write what waits, for at most 2 seconds; a line that comes later has another thread write."""
        if self._finish.alive:  # else it was closed, or the interpreter exits: no thread begins then
            self._finish()
            self._closed = True
        super().close()

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "time": local_time(record.created),
            "program": _ROOT,
            "pid": record.process,
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if run := settings.run_id():
            fields["run"] = run
        fields |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        fields["message"] = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = logging.Formatter().formatException(record.exc_info)
        return fields


def _close(writer: LineWriter, pid: int) -> None:
    """Write what waits, in the writer's process: in a forked child its lock may be held for good."""
    if os.getpid() == pid:
        writer.close(_CLOSE_TIMEOUT)


class _StandardError:
    """Standard error of the moment: a program may set another one, so it is never closed for good."""

    closed = False

    def write(self, text: str) -> None:
        if sys.stderr is not None:
            sys.stderr.write(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            sys.stderr.flush()


def _lost(form: Callable[[dict[str, Any]], str], number: int) -> str:
    text = f"{number} lines were left out: they came faster than they could be written, or could not be"
    now = local_time(time.time())
    return form({"time": now, "program": _ROOT, "pid": os.getpid(), "level": "warning", "message": text})


def log_worlds(level: str = "INFO", form: str = "text", stream: TextIO | None = None) -> Callable[[], None]:
    """Write a line for each thing that happens to this process's worlds.

    The lines of multiworld's loggers go to `stream` alone, no more to the handlers of the program.
    docs/logs.md says which there are at which level.

    Args:
        level: "DEBUG", "INFO", "WARNING", "ERROR" or "OFF": lines below it are left out.
        form: "text" (``key=value``) or "json".
        stream: to write to; None: standard error.

    Returns:
        A function that ends it, and restores what was before; idempotent.

    Raises:
        MultiworldError: `level` or `form` is unknown.
    """
    return attach(level_named("level=", level), LineHandler(stream, _form("form=", form)))


def attach(level: int, handler: logging.Handler) -> Callable[[], None]:
    """Hand the lines of multiworld's loggers, from `level` on, to `handler` alone.

    Returns:
        A function that ends it, restores what was before, and closes the handler; idempotent.
    """
    root = logging.getLogger(_ROOT)
    before = root.level, root.propagate
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False

    def end() -> None:
        aside.flush(_CLOSE_TIMEOUT)
        if handler in root.handlers:
            root.removeHandler(handler)
            root.setLevel(before[0])
            root.propagate = before[1]
            handler.close()

    return end


class _FromEnvironment:
    """Whether M8D_LOG_LEVEL and M8D_LOG_FORMAT have been heeded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False

    def __call__(self) -> None:
        if self._done:
            return
        with self._lock:
            if self._done:
                return
            level = settings.environment("M8D_LOG_LEVEL")
            form = settings.environment("M8D_LOG_FORMAT")
            if level or form:
                least = level_named("M8D_LOG_LEVEL=", level or "INFO")
                written = _form("M8D_LOG_FORMAT=", form or "text")
                root = logging.getLogger(_ROOT)
                if form or not root.hasHandlers():
                    attach(least, LineHandler(None, written))
                else:  # the program has handlers of its own
                    root.setLevel(least)
            self._done = True


from_environment = _FromEnvironment()
"""Do what M8D_LOG_LEVEL and M8D_LOG_FORMAT say; once in a process, at its first join.

Raises:
    MultiworldError: one of them has an unknown value.
"""


def level_named(name: str, value: str) -> int:
    """Return the level of logging that `value` names.

    Args:
        name: of the setting, with "=", for the error.
        value: one of `LEVELS`, in any case.

    Raises:
        MultiworldError: it is unknown.
    """
    found = LEVELS.get(str(value).strip().upper())
    if found is None:
        raise MultiworldError(
            f"{name}{value!r}", rule=f"It is one of {', '.join(LEVELS)}", next_step="Give one of them"
        )
    return found


def _form(name: str, value: str) -> str:
    found = str(value).strip().lower()
    if found not in _FORMS:
        raise MultiworldError(
            f"{name}{value!r}", rule=f"It is one of {', '.join(_FORMS)}", next_step="Give one of them"
        )
    return found
