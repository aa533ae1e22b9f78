"""Pauses Python's cyclic garbage collector while code runs in a thread with a descriptor table of its own.

The collector runs in the thread that happens to allocate. What it destroys belongs to the process: in a
thread with its own table (`_net/descriptor_table.py`) a destructor closes, or wakes through, a number that
means something else there. The destructor of a `TCPStore` that serves then waits for ever for a thread that
it cannot wake, and holds the interpreter's lock.

A pause is process-wide, so it lasts for the moments in which such a thread runs Python, not while it waits.
What a program does with `gc.disable` and `gc.enable` in such a moment (a fraction of a millisecond, each
second) may be undone.
"""

from __future__ import annotations

import _thread
import gc
import os

__all__ = ["pause_collector", "register", "resume_collector"]

_lock = _thread.allocate_lock()
_paused = 0
_was_enabled = False
_registered = False


def pause_collector() -> None:
    """Have no collection begin in any thread until `resume_collector` was called as often as this."""
    # Not `with`: the bound methods that it makes could begin the very collection that this is against.
    global _paused, _was_enabled  # noqa: PLW0603  (the collector is the process's too)
    _lock.acquire()
    if _paused == 0:
        _was_enabled = gc.isenabled()
        gc.disable()
    _paused += 1
    _lock.release()


def resume_collector() -> None:
    """Undo one `pause_collector`."""
    global _paused  # noqa: PLW0603  (the collector is the process's)
    _lock.acquire()
    _paused -= 1
    if _paused == 0 and _was_enabled:
        # What was allocated meanwhile has made a collection due: nothing may allocate here any more, as the
        # end of a `with` does.
        gc.enable()
    _lock.release()


def register() -> None:
    """Have a forked child begin without a pause: the threads that paused are its parent's."""
    global _registered  # noqa: PLW0603  (once in each process)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    global _lock, _paused  # noqa: PLW0603  (the child's own)
    _lock = _thread.allocate_lock()
    if _paused and _was_enabled:
        gc.enable()
    _paused = 0
