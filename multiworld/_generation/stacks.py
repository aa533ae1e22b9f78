"""The Python stacks of this process's threads, as text."""

from __future__ import annotations

import sys
import sysconfig
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["stacks"]

_OURS = "m8d-"
"""What the names of this package's own threads begin with: where those stand says nothing."""

_DEEPEST = 24
"""Calls of each thread, the innermost ones."""

_LIBRARY = sysconfig.get_path("stdlib")
"""A thread that is nowhere else waits for work."""


def stacks() -> str:
    """Return them, each thread's innermost call last; the main thread's last of all.

    Threads that are only in Python's own library (idle pools, queues) are left out, but for the main thread.
    No file is looked at: it may lie where that takes long, and the watchdog's thread asks.
    """
    main, found = threading.main_thread(), []
    frames = sys._current_frames()  # noqa: SLF001  (documented; "for internal and specialized purposes")
    try:
        frames.pop(threading.get_ident(), None)  # this function's own, which has `frames`: a cycle
        for thread in sorted(threading.enumerate(), key=lambda each: each is main):
            lines = _lines(frames.get(thread.ident or 0))
            if not lines or thread.name.startswith(_OURS):
                continue
            if thread is not main and all(name.startswith(_LIBRARY) for name, _, _ in lines):
                continue
            said = [f'  File "{name}", line {line}, in {function}' for name, line, function in lines]
            found.append("\n".join([f"thread {thread.name!r}:", *said]))
    finally:
        frames.clear()  # what other threads have in their variables must not be kept
    return "\n".join(found)


def _lines(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of the innermost calls, the innermost last."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _DEEPEST:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found[::-1]
