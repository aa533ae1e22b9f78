"""Wake-ups of a thread's `poll`: a descriptor for each thread that has led, none for a lane."""

from __future__ import annotations

import functools
import os
import threading

from multiworld.errors import MultiworldError

__all__ = ["NoDescriptorError", "here", "known", "mine"]


class NoDescriptorError(MultiworldError):
    """The process has no descriptor left for a thread that waits, which is no fault of a connection."""


class _Wake:
    _close = staticmethod(os.close)  # at the interpreter's end the module may be cleared before the threads

    fd = -1

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        if self.fd >= 0:
            self._close(self.fd)


here = threading.local()
"""``here.wake`` is there in a thread that has its descriptor, which costs no call to see."""


def mine() -> int:
    """Return the calling thread's descriptor, an eventfd.

    Raises:
        NoDescriptorError: the process has none left.
    """
    try:
        wake: _Wake = here.wake
    except AttributeError:
        _know_forks()
        try:
            wake = here.wake = _Wake()
        except OSError as error:
            raise NoDescriptorError(
                f"a thread that waits for a message needs a descriptor: {error.strerror}",
                rule="Each thread that waits has one, which ends its waiting",
                next_step="Close files, or raise the limit (ulimit -n), and call it again",
            ) from error
    return wake.fd


def known() -> int | None:
    """Return the calling thread's descriptor, if it has one."""
    wake: _Wake | None = getattr(here, "wake", None)
    return None if wake is None else wake.fd


def _forked() -> None:
    # A forked process would share the eventfd of the thread that forked: one would take the other's wake-ups.
    global here  # noqa: PLW0603  (the one of this process)
    here = threading.local()


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)
