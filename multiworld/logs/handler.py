"""`log_worlds` and `from_environment`: write the lines of multiworld's loggers to a stream.

A thread of its own writes: a terminal that is paused, or a full pipe, would else hold up the watchdog, and
others would take this process for hung.
"""

from __future__ import annotations

import contextlib
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
            line = self._form(self._fields(record)) + "\n"
            with contextlib.suppress(RuntimeError):  # no thread is to be had: the line waits for the next one
                self._writer.put(line)
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

    The lines of multiworld's loggers go to `stream`, no more to the handlers of the program, nor to what
    M8D_LOG_LEVEL and M8D_LOG_FORMAT say. Where it is called several times, all have the lines, from the level
    on of the last call that has not ended. docs/logs.md says which there are at which level.

    Args:
        level: "DEBUG", "INFO", "WARNING", "ERROR" or "OFF": lines below it are left out.
        form: "text" (``key=value``) or "json".
        stream: to write to; None: standard error.

    Returns:
        A function that ends it; what was before the first call is restored when all have ended. Idempotent.

    Raises:
        MultiworldError: `level` or `form` is unknown.
    """
    return attach(level_named("level=", level), LineHandler(stream, _form("form=", form)))


class _Attachments:
    """The handlers that have multiworld's lines, in the order in which they were attached.

    The last one's level holds; after the end of all, what was before the first. A handler that is not on the
    logger any more was taken off by the program, which has configured the logger since: nothing is restored.
    """

    def __init__(self) -> None:
        self._root = logging.getLogger(_ROOT)
        self._lock = threading.Lock()
        self._attached: list[tuple[int, logging.Handler]] = []
        self._before = logging.NOTSET, True
        self._environment: tuple[int, str] | None = None  # while it gives way to what the program attached
        self._from_environment: tuple[logging.Handler, int, str] | None = None

    def attach(self, level: int, handler: logging.Handler) -> None:
        """Attach a handler of the program's; the environment's gives way until all of these have ended."""
        _know_forks()
        gave_way = None
        with self._lock:
            if self._from_environment is not None:
                gave_way, least, form = self._from_environment
                self._from_environment = None
                if self._take_off(gave_way):
                    self._environment = least, form
            self._add(level, handler)
        if gave_way is not None:
            gave_way.close()

    def end(self, handler: logging.Handler) -> None:
        """Take a handler off, and close it; does nothing where it was taken off before."""
        with self._lock:
            was_there = self._take_off(handler)
            if was_there and not self._attached and self._environment is not None:
                said, self._environment = self._environment, None
                self._heed(*said)
        if was_there:
            handler.close()

    def heed(self, level: int, form: str) -> None:
        """Do what the environment says, now or after the end of what the program has attached."""
        with self._lock:
            self._forget_absent()
            if self._attached:
                self._environment = level, form
            else:
                self._heed(level, form)

    def _heed(self, level: int, form: str) -> None:
        if form or not self._root.hasHandlers():
            handler = LineHandler(None, form or "text")
            self._from_environment = (handler, level, form)
            self._add(level, handler)
        else:  # the program has handlers of its own
            self._root.setLevel(level)

    def _add(self, level: int, handler: logging.Handler) -> None:
        self._forget_absent()
        if not self._attached:
            self._before = self._root.level, self._root.propagate
        self._attached.append((level, handler))
        self._root.addHandler(handler)
        self._apply()

    def _take_off(self, handler: logging.Handler) -> bool:
        """Whether it was there."""
        self._forget_absent()
        left = [each for each in self._attached if each[1] is not handler]
        if len(left) == len(self._attached):
            return False
        self._attached = left
        self._root.removeHandler(handler)
        self._apply()
        return True

    def _forget_absent(self) -> None:
        self._attached = [each for each in self._attached if each[1] in self._root.handlers]

    def _apply(self) -> None:
        if self._attached:
            self._root.setLevel(self._attached[-1][0])
            self._root.propagate = False
        else:
            self._root.setLevel(self._before[0])
            self._root.propagate = self._before[1]


_attachments = _Attachments()


def attach(level: int, handler: logging.Handler) -> Callable[[], None]:
    """Hand the lines of multiworld's loggers, from `level` on, to `handler`, and not to the program's.

    What was attached before has them, too, from the level on of what was attached last.

    Returns:
        A function that ends it, and closes the handler. What is still attached goes on, with the level of the
        last; after the end of all it is as before the first. Idempotent.
    """
    _attachments.attach(level, handler)

    def end() -> None:
        aside.flush(_CLOSE_TIMEOUT)
        _attachments.end(handler)

    return end


class _FromEnvironment:
    """Whether M8D_LOG_LEVEL and M8D_LOG_FORMAT have been heeded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False

    def __call__(self) -> None:
        if self._done:
            return
        _know_forks()
        with self._lock:
            if self._done:
                return
            level = settings.environment("M8D_LOG_LEVEL")
            form = settings.environment("M8D_LOG_FORMAT")
            if level or form:
                least = level_named("M8D_LOG_LEVEL=", level or "INFO")
                _attachments.heed(least, _form("M8D_LOG_FORMAT=", form) if form else "")
            self._done = True


from_environment = _FromEnvironment()
"""Do what M8D_LOG_LEVEL and M8D_LOG_FORMAT say; once in a process, at its first join.

Where the program has called `log_worlds`, they hold after the end of that.

Raises:
    MultiworldError: one of them has an unknown value.
"""


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for each in (from_environment, _attachments):
        each._lock = threading.Lock()  # noqa: SLF001  (of this module; another thread may have held it)


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
