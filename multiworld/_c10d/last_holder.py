"""Let go of a process group's backend after everything else that holds it, and without the GIL.

The destructor of a backend (ProcessGroupGloo, ProcessGroupNCCL) joins the backend's threads. Such a thread
needs the GIL where it drops the last reference to a tensor, so a thread that has the GIL must not run the
destructor: each would wait for the other, and the process stands still. The backend's Python object lets go
of the GIL before it; DDP's reducer does not (torch 2.13.0: in a world whose group had been freed, `del model`
just after its backward pass had raised). So the Python object of a backend is kept here until nothing else
holds the C++ object.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
import weakref
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed

from multiworld._c10d.gloo import cxx
from multiworld._c10d.nccl.backend import backends_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LastHolder", "backends_in", "countable", "last_holder"]

FIRST_PAUSE = 0.05
"""Seconds to the first look; each pause is twice as long as the one before."""

LONGEST_PAUSE = 0.5
"""Seconds."""

_FOR_NOW = {errno.EMFILE, errno.ENFILE}


class _Kept(NamedTuple):
    """A backend, and the process group that users have of it, if that is known."""

    backend: Any
    group: weakref.ref[Any] | None


class LastHolder:
    """Keeps backends that others hold. Any thread; also in a garbage collection, so without a lock."""

    def __init__(self) -> None:
        # Its methods may be called again in the middle of each other, in the same thread.
        self._new: queue.SimpleQueue[_Kept | None] = queue.SimpleQueue()
        self._inherited: list[Any] = []
        self._running = self._registered = self._freeing = self._stopped = False

    def let_go(self, backend: Any, group: weakref.ref[Any] | None = None) -> None:
        """Let go of a backend: at once where nothing else holds it.

        Args:
            backend: the caller has no other reference to it, and drops this one.
            group: the process group that users have. Where holders cannot be counted, the backend is kept as
                long as that lives, and for a moment after it.
        """
        kept = _Kept(backend, group)
        del backend
        if countable() and not _held([kept]):
            return
        self._new.put(kept)
        if not self._running:
            self._start()

    def nudge(self) -> None:
        """Let it look now, in its own thread."""
        if self._running:
            self._new.put(None)

    def stop(self, deadline: float) -> None:
        """Free nothing any more: the program ends, and its end would end a thread that is in a destructor.

        Args:
            deadline: ``time.monotonic()`` seconds.
        """
        self._stopped = True
        while self._freeing and time.monotonic() < deadline:
            time.sleep(0.001)

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
        self._inherited.append(self._new)
        self._new, self._running, self._freeing = queue.SimpleQueue(), False, False

    def _run(self) -> None:
        kept: list[_Kept] = []
        pause = FIRST_PAUSE
        while True:
            time.sleep(FIRST_PAUSE / 10)  # not more often, however often it is nudged
            before = len(kept)
            with contextlib.suppress(queue.Empty):
                kept += filter(None, [self._new.get(timeout=pause)])
                while True:
                    kept += filter(None, [self._new.get_nowait()])
            pause = FIRST_PAUSE if len(kept) > before else min(2 * pause, LONGEST_PAUSE)
            held = _held(kept)
            free = [each for each in kept if not any(each is other for other in held)]
            kept.clear()  # the list of what is free is the only one that has it
            kept += held
            if not self._free(free):
                kept += free
            del held, free
            if not kept:
                self._running = False
                if self._new.empty():  # else one came from a thread that saw this one run
                    return
                self._running = True

    def _free(self, free: list[_Kept]) -> bool:
        """Free them in a thread of their own, whose destructors may hang; return whether that was begun."""
        self._freeing = True
        try:
            if self._stopped:
                return not free
            if free:
                threading.Thread(target=free.clear, name="m8d-release", daemon=True).start()
        except RuntimeError:  # no thread is left for this process
            return False
        finally:
            self._freeing = False
        return True


def backends_in(groups: Iterable[Any]) -> list[tuple[Any, weakref.ref[Any]]]:
    """Return the backends of process groups, each with its group, as `LastHolder.let_go` takes them."""
    return [(backend, weakref.ref(group)) for group in groups for backend in backends_of(group, gloo=True)]


def _held(kept: list[_Kept]) -> list[_Kept]:
    """Return those whose C++ object others hold too, or may hold."""
    if not countable():
        return [each for each in kept if each.group is not None and each.group() is not None]
    try:
        with closing(cxx.Memory()) as memory:
            return [each for each in kept if _bound(each.backend) and cxx.holders(memory, each.backend) != 1]
    except OSError:  # no free descriptor: it is asked again
        return list(kept)


def _bound(instance: object) -> bool:
    """Whether it is a Python object of pybind11's, as those of all C++ classes of torch.distributed are."""
    return type(type(instance)).__name__ == "pybind11_type"


def countable() -> bool:
    """Whether the holders of torch's C++ objects can be counted here."""
    try:
        return _counted()
    except OSError as error:  # without a free descriptor it is not known yet: they are kept
        return error.errno in _FOR_NOW


@cache
def _counted() -> bool:
    """Try it with two stores."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with closing(cxx.Memory()) as memory:
        alone = cxx.holders(memory, store)
        other = torch.distributed.PrefixStore("", store)  # type: ignore[attr-defined]
        shared = cxx.holders(memory, store)
        del other
        return (alone, shared, cxx.holders(memory, store)) == (1, 2, 1)


last_holder = LastHolder()
"""The process's own."""
