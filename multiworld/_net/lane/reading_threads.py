"""Threads that read messages from the memory of their senders, for as long as there are such messages.

Each call has a thread of its own: if a sender dies, the kernel may keep one for as long as it takes to free
that process's memory (see `Copied`), and no other message waits for it. A free thread ends after a second.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run"]

_IDLE = 1.0  # seconds until a thread ends


class _Thread:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._turn = threading.Lock()
        self._turn.acquire()
        threading.Thread(target=self._run, daemon=True, name="m8d-read").start()

    def take(self, call: Callable[[], None]) -> None:
        self._call = call
        self._turn.release()

    def _run(self) -> None:
        while True:
            self._call()
            del self._call
            free = _free
            free.append(self)
            if not self._turn.acquire(timeout=_IDLE):
                try:
                    free.remove(self)
                except ValueError:  # it was taken at that moment
                    self._turn.acquire()
                else:
                    return


# Its calls are atomic. No lock, which a fork could leave held.
_free: list[_Thread] = []


def run(call: Callable[[], None]) -> None:
    """Have `call`, which raises nothing, made in a thread.

    Raises:
        RuntimeError: the process gets no other thread.
    """
    _know_forks()
    try:
        thread = _free.pop()
    except IndexError:
        _Thread(call)
    else:
        thread.take(call)


def _forked() -> None:
    global _free  # noqa: PLW0603  (the threads are the parent's)
    _free = []


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)
