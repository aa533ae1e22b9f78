"""Calls that come in the middle of another call of this package, in the same thread: of a signal's handler.

Python runs handlers in the main thread, between two instructions of whatever it does. If that is a call of
this package it may hold locks, which it lets go of only after the handler has returned: what the handler
calls must not wait for them in that thread. A garbage collection may come in the middle in the same way, and
in any thread: in the watchdog's, what a program's destructor calls would hold up the signs of life.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from typing import TYPE_CHECKING

from multiworld.logs.aside import may_wait

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["in_the_middle", "in_time"]

_PACKAGE = __name__.partition(".")[0]

_STARTERS = (f"{_PACKAGE}.run.", f"{_PACKAGE}.launch.")
"""Modules that call a whole program of the user's, and hold no lock meanwhile."""


def in_the_middle() -> bool:
    """Whether the call of this package in which this is asked came in the middle of another one.

    Always True in a thread that must not wait, the watchdog's: only a destructor, or a subscriber, calls
    there. In all others but the main one only a destructor comes in the middle: no handler runs there, and
    what this package calls there on purpose, as a function given to `on_break`, it calls without locks.
    """
    if not may_wait():
        return True
    # Nothing is remembered of a handler, but its frame is of no module of this package.
    anything = threading.current_thread() is threading.main_thread()
    outside = False
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  (the documented way to the caller's frame)
    while frame is not None:
        own = _own(frame)
        if own and outside:
            return True
        outside = outside or (not own and (anything or _is_destructor(frame)))
        frame = frame.f_back
    return False


def _own(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] == _PACKAGE and not name.startswith(_STARTERS)


def _is_destructor(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") == "weakref"


def in_time(function: Callable[[], bool], seconds: float, name: str) -> bool:
    """Call `function` in a daemon thread, for as long as this thread may hold what it needs.

    Args:
        function: must not raise; it goes on after that time.
        seconds: to wait for it; a thread that must not wait does not.
        name: of the thread.

    Returns:
        What `function` returns; False where it has not yet, and where there is no thread left for it.
    """
    results: list[bool] = []
    done = threading.Event()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            results.append(context.run(function))
        finally:
            done.set()

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:  # the host has none left: here it might wait for ever
        return False
    return done.wait(seconds if may_wait() else 0.0) and bool(results and results[0])
