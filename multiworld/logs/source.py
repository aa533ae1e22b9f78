"""`logger`: the standard library's logger of a module, whose lines are limited and name their world.

Programs configure the loggers as any others, below "multiworld". A line above DEBUG of which there were too
many (`multiworld.logs.limit`) is left out, for every handler; the next one of its kind says how many were.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import partial

from multiworld.logs.aside import divert, hand_over
from multiworld.logs.limit import RateLimit

__all__ = ["FIELDS", "about", "logger"]

FIELDS = ("world", "generation", "rank")
"""Attributes of a record that is about a member of a world."""


class _Limited(logging.Filter):
    """Leaves out what is too much of one kind: a place in the code, or the record's ``kind``, and a world."""

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    def _begin(self) -> None:
        self._limit = RateLimit()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        if self._pid != os.getpid():  # a forked child: a thread of the parent's may have held the lock
            self._begin()
        kind = (record.name, getattr(record, "kind", record.lineno), getattr(record, "world", None))
        # A signal's handler may log in the middle of this: it must not wait for itself.
        if not self._lock.acquire(blocking=False):
            return True
        try:
            left_out = self._limit.take(kind, time.monotonic())
        finally:
            self._lock.release()
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more of these were left out)", ()
        return left_out is not None


_LIMITED = _Limited()


def _here(record: logging.LogRecord) -> bool:
    """Whether this thread hands the line to the handlers."""
    return not divert(record)


def _hand_over(found: logging.Logger, record: logging.LogRecord) -> None:
    hand_over(record, partial(type(found).callHandlers, found))


def logger(name: str) -> logging.Logger:
    """Return the logger `name` of the standard library, with its lines limited.

    Lines of a thread that must not wait come from another one (`multiworld.logs.aside`). An error of a
    handler does not come out of the call that logs: that may be in the middle of a world's end.
    """
    found = logging.getLogger(name)
    if "callHandlers" not in vars(found):
        # The class's method is looked up each time: tools replace it there, to see all lines.
        found.callHandlers = partial(_hand_over, found)  # type: ignore[method-assign]
    found.addFilter(_LIMITED)
    found.addFilter(_here)
    return found


for _below in ("multiworld.events", "multiworld.settings"):
    logger(_below)  # these modules are below this one, and log by the standard library's own function


def about(
    world: str, generation: int | None = None, rank: int | None = None, *, kind: str | None = None
) -> dict[str, object]:
    """Return what a line about a world has as ``extra``.

    Args:
        world: name.
        generation: its number; None where the line is about none.
        rank: of this process in it; None where it has none.
        kind: tells lines of one place in the code apart that are limited one by one.
    """
    values = dict(zip((*FIELDS, "kind"), (world, generation, rank, kind), strict=True))
    return {name: value for name, value in values.items() if value is not None}
