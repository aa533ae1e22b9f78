"""What a thread has written: the proof that waiting for a send of gloo's will not block.

A send says that it is complete only after somebody has waited for it, and a wait that times out ends the group. But
where the receiver waits already, gloo writes the whole message within the call that posts it: 48 bytes that announce
it, then 48 and the message. The kernel counts the bytes and the calls of each thread (``/proc/thread-self/io``, asked in
0.7 µs), so nobody else's are in it. Whoever has written all of that, and nothing else, has no need to wait.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref

__all__ = ["WriteCount", "here"]

_PREAMBLE = 48
"""Bytes that gloo sends of its own: as an announcement of a message, and before it. The same in torch 2.4 to 2.15."""


class WriteCount:
    """What one thread has written, ever; for that thread."""

    def __init__(self) -> None:
        _know_forks()
        self.forks = _forks
        self._file = -1
        self._closing: weakref.finalize[..., WriteCount] | None = None
        try:
            self._file = os.open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no such file in this system, or not for us
            return
        self._closing = weakref.finalize(self, os.close, self._file)

    def disown(self) -> None:
        """Never close the file: in a forked process its number may be another file's by now."""
        if self._closing is not None:
            self._closing.detach()

    def count(self) -> tuple[int, int] | None:
        """Return how many bytes, and in how many calls; None where the system does not say."""
        if self._file < 0:
            return None
        try:
            words = os.pread(self._file, 256, 0).split()
            return int(words[3]), int(words[7])  # wchar and syscw
        except (OSError, ValueError, IndexError):
            self._file = -1
            return None

    def message(self, nbytes: int, since: tuple[int, int] | None) -> bool:
        """Whether it is one message of gloo's, whole, and nothing else.

        Args:
            nbytes: without gloo's own.
            since: `count` before the message was posted.
        """
        if since is None or (count := self.count()) is None:
            return False
        return (count[0] - since[0], count[1] - since[1]) == (2 * _PREAMBLE + nbytes, 2)


_forks = 0  # since this module was loaded: a forked process's thread is another one
_here = threading.local()


def _forked() -> None:
    global _forks  # noqa: PLW0603  (there is one process)
    _forks += 1


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def here() -> WriteCount:
    """Return the calling thread's."""
    found: WriteCount | None = getattr(_here, "count", None)
    if found is not None and found.forks != _forks:
        found.disown()
        found = None
    if found is None:
        found = _here.count = WriteCount()
    return found
