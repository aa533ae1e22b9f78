"""Write accounting: proof, from the kernel's counters of a thread, that a gloo send is complete.

A send reports completion only after a wait, and a wait that times out ends the group. But where the receiver
waits already, gloo writes the whole message within the call that posts it: an announcement of 48 bytes, then
48 bytes and the message. The kernel counts bytes and calls for each thread (``/proc/thread-self/io``, read in
0.7 µs). A thread whose counters grew by exactly that need not wait.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref

__all__ = ["WriteCount", "here"]

_PREAMBLE = 48
"""Bytes of gloo's header, sent as an announcement and again before the message; the same in torch 2.4 to
2.15."""


class WriteCount:
    """Counter of one thread's writes; for that thread only."""

    def __init__(self) -> None:
        _know_forks()
        self.forks = _forks[0]
        self._file = -1
        self._closing: weakref.finalize[..., WriteCount] | None = None
        try:
            self._file = os.open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no such file in this system, or not readable
            return
        self._closing = weakref.finalize(self, os.close, self._file)

    def disown(self) -> None:
        """Give the file up without closing it: in a forked process its number may be reused by now."""
        if self._closing is not None:
            self._closing.detach()

    def count(self) -> tuple[int, int] | None:
        """Return the numbers of bytes and calls; None where the system does not count them."""
        if self._file < 0:
            return None
        try:
            words = os.pread(self._file, 256, 0).split()
            return int(words[3]), int(words[7])  # wchar and syscw
        except (OSError, ValueError, IndexError):
            self._file = -1
            return None

    def message(self, nbytes: int, since: tuple[int, int] | None) -> bool:
        """Whether exactly one whole gloo message was written.

        Args:
            nbytes: of the message, without headers.
            since: `count` before the message was posted.
        """
        if since is None or (count := self.count()) is None:
            return False
        return (count[0] - since[0], count[1] - since[1]) == (2 * _PREAMBLE + nbytes, 2)


_forks = [0]  # since this module was loaded, to recognize counters of the parent's threads
_here = threading.local()


def _forked() -> None:
    _forks[0] += 1


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def here() -> WriteCount:
    """Return the calling thread's counter."""
    found: WriteCount | None = getattr(_here, "count", None)
    if found is not None and found.forks != _forks[0]:
        found.disown()
        found = None
    if found is None:
        found = _here.count = WriteCount()
    return found
