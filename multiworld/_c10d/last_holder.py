"""Let go of a process group's backend after everything else that holds it, and without the GIL.

The destructor of a backend (ProcessGroupGloo, ProcessGroupNCCL) joins the backend's threads. Such a thread
needs the GIL where it drops the last reference to a tensor, so a thread that has the GIL must not run the
destructor: each would wait for the other, and the process stands still. The backend's Python object lets go
of the GIL before it; DDP's reducer does not (torch 2.13.0: in a world whose group had been freed, `del model`
just after its backward pass had raised). So the Python object of a backend is kept here until nothing else
holds the C++ object.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed

from multiworld._c10d.gloo import cxx

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LastHolder", "last_holder"]

FIRST_PAUSE = 0.05
"""Seconds to the first look; each pause is twice as long as the one before. Where the holders cannot be
counted, backends are let go of at the first look: a thread of theirs has ended its operation by then."""

LONGEST_PAUSE = 0.5
"""Seconds."""


class LastHolder:
    """Keeps backends that others hold. Any thread; also in a garbage collection, so without a lock."""

    def __init__(self) -> None:
        self._kept: deque[Any] = deque()
        self._inherited: list[deque[Any]] = []
        self._running = False
        self._registered = False

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    def let_go(self, backends: list[Any]) -> None:
        """Let go of backends: at once those that nothing else holds. The list is empty afterwards.

        Args:
            backends: the caller has no other references to them.
        """
        held = held_by_others(backends)
        for each in held:
            self._kept.append(each)
        held.clear()
        backends.clear()
        if self._kept and not self._running:
            self._start()

    def _start(self) -> None:
        if not self._registered:
            self._registered = True
            os.register_at_fork(after_in_child=self._forked)
        self._running = True
        try:
            threading.Thread(target=self._run, name="m8d-last-holder", daemon=True).start()
        except RuntimeError:  # no thread is left for this process: with the next backend, then
            self._running = False

    def _forked(self) -> None:
        # Their threads do not live in a child: a destructor would wait for them for ever.
        self._inherited.append(self._kept)
        self._kept, self._running = deque(), False

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            time.sleep(pause)
            before = len(self._kept)
            self.look()
            pause = FIRST_PAUSE if len(self._kept) > before else min(2 * pause, LONGEST_PAUSE)
            if not self._kept:
                self._running = False
                if not self._kept:  # none was added meanwhile, by a thread that saw this one run
                    return
                self._running = True

    def look(self) -> None:
        """Free those that nothing else holds any more; returns at once."""
        looked_at = [self._kept.popleft() for _ in range(len(self._kept))]
        held = held_by_others(looked_at) if countable() else []
        self._kept.extend(held)
        free = [each for each in looked_at if not any(each is other for other in held)]
        looked_at.clear()
        held.clear()
        if not free:
            return
        try:
            # A destructor that hangs holds up this thread only. The program's end waits for such threads.
            threading.Thread(target=free.clear, name="m8d-release", daemon=True).start()
        except RuntimeError:
            self._kept.extend(free)


def held_by_others(backends: Iterable[Any]) -> list[Any]:
    """Return those whose C++ object others hold too, or may hold where this system does not tell."""
    if not countable():
        return list(backends)
    try:
        with closing(cxx.Memory()) as memory:
            return [each for each in backends if _bound(each) and cxx.holders(memory, each) != 1]
    except OSError:  # no free descriptor: it is asked again
        return list(backends)


def _bound(instance: object) -> bool:
    """Whether it is a Python object of pybind11's, as those of all C++ classes of torch.distributed are."""
    return type(type(instance)).__name__ == "pybind11_type"


@cache
def countable() -> bool:
    """Whether the holders of torch's C++ objects can be counted here; tried with two stores."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    try:
        with closing(cxx.Memory()) as memory:
            alone = cxx.holders(memory, store)
            other = torch.distributed.PrefixStore("", store)  # type: ignore[attr-defined]
            shared = cxx.holders(memory, store)
            del other
            return (alone, shared, cxx.holders(memory, store)) == (1, 2, 1)
    except OSError:
        return False


last_holder = LastHolder()
"""The process's own."""
