"""The Python stacks of this process's threads, as text."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback

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
    Lines of source are not read: files may lie where reading takes long.
    """
    frames = sys._current_frames()  # noqa: SLF001  (documented; "for internal and specialized purposes")
    main = threading.main_thread()
    found = []
    for thread in sorted(threading.enumerate(), key=lambda each: each is main):
        frame = None if thread.ident is None else frames.get(thread.ident)
        if frame is None or thread.name.startswith(_OURS):
            continue
        summary = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_DEEPEST, lookup_lines=False
        )
        if thread is not main and all(each.filename.startswith(_LIBRARY) for each in summary):
            continue
        lines = [
            f'  File "{each.filename}", line {each.lineno}, in {each.name}' for each in reversed(summary)
        ]
        found.append("\n".join([f"thread {thread.name!r}:", *lines]))
    return "\n".join(found)
