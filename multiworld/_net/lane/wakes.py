"""What ends a thread's `poll`: a descriptor for each thread that has led, none for a lane."""

from __future__ import annotations

import functools
import os
import threading

__all__ = ["mine"]


class _Wake:
    _close = staticmethod(os.close)  # at the interpreter's end the module may be cleared before the threads

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        self._close(self.fd)


_here = threading.local()


def mine() -> int:
    """Return the calling thread's descriptor, an eventfd.

    Raises:
        OSError: the process has no descriptor left.
    """
    try:
        wake: _Wake = _here.wake
    except AttributeError:
        _know_forks()
        wake = _here.wake = _Wake()
    return wake.fd


def _forked() -> None:
    # A forked process would share the eventfd of the thread that forked: one would take the other's wake-ups.
    global _here  # noqa: PLW0603  (the one of this process)
    _here = threading.local()


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)
