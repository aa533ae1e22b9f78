"""Lines of threads that must not wait: another thread hands them to the handlers.

A handler is the program's own, and standard error may be a terminal that is paused. One that blocks would
stop the watchdog's thread, and the other members would take this process for hung.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from multiworld.logs.writer import Backlog

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["divert", "flush", "hand_over", "may_wait", "never_wait"]

_IDLE = 0.1
"""Seconds without a line after which the thread ends: breakages are rare."""
_CLOSE_TIMEOUT = 2.0
"""Seconds for which the interpreter's exit waits for lines."""

_here = threading.local()
_fallback = logging.Handler()  # says on standard error that a handler has failed


def never_wait() -> None:
    """Have another thread hand the lines of this one to the handlers, from now on."""
    _here.never_waits = True


def may_wait() -> bool:
    """Whether this thread may wait: `never_wait` was not called in it."""
    return not getattr(_here, "never_waits", False)


def divert(record: logging.LogRecord) -> bool:
    """Have another thread hand a line to the handlers, if this thread must not wait; whether it must not."""
    if may_wait():
        return False
    with contextlib.suppress(RuntimeError):  # no thread is to be had: the line waits for the next one
        _lines().put(record)
    return True


def hand_over(record: logging.LogRecord, handlers: Callable[[logging.LogRecord], None]) -> None:
    """Give a line to the program's handlers; what one raises is told on standard error, as logging does."""
    try:
        handlers(record)
    except Exception:  # noqa: BLE001  (of the program's own code)
        _fallback.handleError(record)


def flush(timeout: float) -> None:
    """Wait until the handlers have all lines that were diverted, for at most `timeout` seconds."""
    if _Present.lines is not None and _Present.lines.pid == os.getpid():
        _Present.lines.flush(timeout)


class _Lines(Backlog[logging.LogRecord]):
    """Hands lines to the handlers of their loggers.

    Attributes:
        pid: of its process: a forked child has none of its threads.
    """

    def __init__(self) -> None:
        super().__init__("m8d-log-aside", idle=_IDLE)
        self.pid = os.getpid()
        atexit.register(self._finish)

    def _finish(self) -> None:
        """At the interpreter's exit: have what waits handled."""
        if self.pid == os.getpid():
            self.close(_CLOSE_TIMEOUT)

    def _handle(self, thing: logging.LogRecord) -> bool:
        hand_over(thing, logging.getLogger(thing.name).callHandlers)
        return True

    def _lost(self, number: int) -> logging.LogRecord:
        text = "%d lines were left out: they came faster than they could be written"
        return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (number,), None)


class _Present:
    """The lines of this process."""

    lines: _Lines | None = None


def _lines() -> _Lines:
    # Without a lock: one thread of a process must not wait, the watchdog's.
    if _Present.lines is None or _Present.lines.pid != os.getpid():
        _Present.lines = _Lines()
    return _Present.lines
