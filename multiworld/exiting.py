"""The program's end: functions that are called then, and whether an exception ends it.

Whether one does is asked at the end, of what the interpreter remembers: `sys.excepthook` is the program's
own. What `sys.exit` was called with is not remembered: a program that ends that way leaves its worlds in
good order, whatever its status. Only `multiprocessing` remembers the exit status of a child.
"""

from __future__ import annotations

import atexit
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["before_threads_are_joined", "failure", "name_of"]

_LONGEST = 200  # characters of a type's name


def before_threads_are_joined(fn: Callable[[], Any]) -> bool:
    """Have a function called when the program ends, the last one first; False where it ends already."""
    # A user's thread that is blocked in a receive would keep the interpreter waiting for it, before any
    # atexit function runs; this hook (the one concurrent.futures uses) runs earlier. Where it is missing,
    # atexit must do.
    register: Callable[[Callable[[], Any]], Any] = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(fn)
    except RuntimeError:
        return False
    return True


def failure() -> str | None:
    """Say what ends this program; None where it ends in the ordinary way.

    To be called by the main thread, from a function that runs at the interpreter's exit.
    """
    status = _child_status(sys._getframe())  # noqa: SLF001  (the documented way to the caller's frame)
    if status is not None:
        return f"its program ended with exit status {status}" if status else None
    # Set by the interpreter for an exception that was not caught; by 3.12 there is `last_exc` too.
    kind, traceback = getattr(sys, "last_type", None), getattr(sys, "last_traceback", None)
    if kind is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return None  # of a prompt it is the last one that was shown
    if issubclass(kind, KeyboardInterrupt):
        return None  # Ctrl-C is how a user ends a program
    if traceback is not None and traceback.tb_frame.f_back is not None:
        return None  # shown by a console inside of the program, which went on
    return f"its program ended with {name_of(kind)}"


def name_of(kind: type) -> str:
    """Return the name of an exception's type, as others are told it."""
    module = getattr(kind, "__module__", "builtins")
    own = getattr(kind, "__qualname__", "an exception")
    return (own if module in {"builtins", "__main__"} else f"{module}.{own}")[:_LONGEST]


def _child_status(frame: FrameType | None) -> int | None:
    """Return the exit status of a child of `multiprocessing` that is ending; None where this is none."""
    while frame is not None:
        if (
            frame.f_code.co_name == "_bootstrap"
            and frame.f_globals.get("__name__") == "multiprocessing.process"
        ):
            status = frame.f_locals.get("exitcode")
            return status if isinstance(status, int) else None
        frame = frame.f_back
    return None
