"""gloo devices, each with one thread and one listener, shared by the worlds of a process.

A device per world would cost a thread and four descriptors each, and a hundred such threads take 8 % of a
core while idle (gloo wakes each of them every 10 ms). A few devices serve any number of worlds.

A device is not shared while a group connects: an abort ends a group by its sockets, which are identified by
the device that accepted them, or that they lead to (`sockets.py`). So a device belongs to one world from the
world's first address in the store until every member has reported its group built; other worlds take another
device meanwhile. Groups that user code makes in a world do not report that, and get a device of their own.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

from multiworld._c10d.gloo import sockets

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LIMIT", "PATIENCE", "Device", "DevicePool", "Lease", "pool"]

LIMIT = max(1, min(4, os.cpu_count() or 1))
"""Shared devices at most, for each place to listen at: more threads than cores move no more bytes."""

PATIENCE = 0.1
"""Seconds after which one more device is made if all are connecting and none becomes free. Otherwise two
processes that join the same worlds in different orders would wait for each other forever."""

_TURN = 0.1
"""Seconds between two checks whether the wait was cancelled."""

Device = NewType("Device", object)
"""One of gloo's: it is made, kept, and given to groups; nothing asks it anything."""

Where = tuple[tuple[str, str], ...]
"""Where to listen: ("interface", name) or ("hostname", address), one or more."""


@dataclass(eq=False)
class _Entry:
    """Shared state of the leases of one device, or of one for each of several interfaces."""

    where: Where
    made: list[Device] = field(default_factory=list)
    users: int = 0
    connecting: bool = True


@dataclass(eq=False)
class _Waiting:
    """Waiters for a device, and since when none has become free."""

    where: Where
    order: str
    since: float = 0.0
    freed: int = 0
    bell: threading.Event = field(default_factory=threading.Event)


class Lease:
    """One group's hold on a device.

    Attributes:
        devices: gloo's, for the options of a ProcessGroupGloo; empty once released.
        among: number of groups with a hold on a device when this one got its own, itself included.
    """

    def __init__(self, owner: DevicePool, entry: _Entry, among: int) -> None:
        self.devices = list(entry.made)
        self.among = among
        self._owner = owner
        self._entry = entry
        self._connecting = self._held = True

    def connected(self) -> None:
        """Let other worlds connect on the device: every member's group is built. Idempotent."""
        if self._connecting:
            self._connecting = False
            self._owner._connected(self._entry)

    def give_back(self) -> bool:
        """Release it. Idempotent.

        Where the group was not built, members may still be connecting to the device, so no other world gets
        it.

        Returns:
            Whether this was the last lease, so that the device ends with the group.
        """
        self.devices = []
        held, self._held = self._held, False
        return held and self._owner._give_back(self._entry, spoiled=self._connecting)


class DevicePool:
    """The devices of a process.

    Args:
        limit: see `LIMIT`.
        patience: see `PATIENCE`.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, limit: int = LIMIT, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._patience = patience
        self._clock = clock
        self._inherited: list[_Entry] = []
        self._registered = False
        self._entries: list[_Entry] = []
        self._leases = self._forks = self._freed = 0
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()

    @property
    def devices(self) -> int:
        """Number of shared devices."""
        return len(self._entries)

    def take(
        self,
        where: Where,
        make: Callable[[Where], list[Device]],
        check: Callable[[], None],
        *,
        shared: bool,
        order: str = "",
    ) -> Lease:
        """Return a lease of a device, exclusive until `Lease.connected`.

        Args:
            where: to listen at.
            make: makes gloo's devices for it.
            check: called while this waits; raises to give up.
            shared: whether other worlds may use it before and after; otherwise it is made for this one.
            order: the waiter with the smallest is next; equal on all members of a world, so that they connect
                the same worlds first.

        Raises:
            Exception: what `make` or `check` raised.
        """
        entry = self._reserve(_Waiting(where, order), check) if shared else _Entry(where, users=1)
        with self._lock:
            self._leases += 1
            among = self._leases
        if not entry.made:
            try:
                entry.made = make(where)
            except BaseException:
                self._give_back(entry, spoiled=True)
                raise
        return Lease(self, entry, among)

    def keep(self) -> Callable[[], None]:
        """Let the current devices outlive their last group; return a function that ends that.

        A world that is joined again needs one soon, and destroying a device takes gloo up to 10 ms.
        """
        with self._lock:
            kept, forks = list(self._entries), self._forks
            for entry in kept:
                entry.users += 1

        def release() -> None:
            if forks == self._forks:  # else they are the parent's
                for entry in kept:
                    self._release(entry, spoiled=False)

        return release

    def _reserve(self, waiting: _Waiting, check: Callable[[], None]) -> _Entry:
        waiting.since, waiting.freed = self._clock(), self._freed
        try:
            with self._lock:
                self._waiting.append(waiting)
            while True:
                with self._lock:
                    waiting.bell.clear()
                    entry = self._next(waiting)
                    if entry is not None:
                        entry.users += 1
                        entry.connecting = True
                        return entry
                waiting.bell.wait(min(_TURN, self._patience))
                check()
        finally:
            with self._lock:
                if waiting in self._waiting:  # else Ctrl-C came before
                    self._waiting.remove(waiting)
                self._ring(waiting.where)

    def _next(self, waiting: _Waiting) -> _Entry | None:
        """Return the device for a waiter, if it is its turn."""
        now = self._clock()
        first = self._first(waiting.where) is waiting
        if not first or waiting.freed != self._freed:
            waiting.since, waiting.freed = now, self._freed
        return self._choose(waiting.where, late=now - waiting.since >= self._patience) if first else None

    def _first(self, where: Where) -> _Waiting | None:
        here = (each for each in self._waiting if each.where == where)
        return min(here, key=lambda each: each.order, default=None)

    def _ring(self, where: Where) -> None:
        """Wake the next waiter after a change, and only that one."""
        first = self._first(where)
        if first is not None:
            first.bell.set()

    def _choose(self, where: Where, *, late: bool) -> _Entry | None:
        """Return the device to take now; None to wait. Made anew while there are few, or if `late`."""
        here = [each for each in self._entries if each.where == where]
        idle = [each for each in here if not each.connecting]
        if idle and (len(here) >= self._limit or not all(each.users for each in idle)):
            return min(idle, key=lambda each: each.users)
        if len(here) >= self._limit and not late:
            return None
        if not self._registered:
            # A forked child has neither the devices' threads nor the lock's holder, and a destructor would
            # wait for both.
            self._registered = True
            os.register_at_fork(after_in_child=self._forked)
        entry = _Entry(where)
        self._entries.append(entry)
        return entry

    def _connected(self, entry: _Entry) -> None:
        with self._lock:
            if entry.connecting:
                entry.connecting = False
                self._freed += 1
                self._ring(entry.where)

    def _give_back(self, entry: _Entry, *, spoiled: bool) -> bool:
        with self._lock:
            self._leases -= 1
        return self._release(entry, spoiled=spoiled)

    def _release(self, entry: _Entry, *, spoiled: bool) -> bool:
        with self._lock:
            entry.users -= 1
            if (spoiled or not entry.users) and entry in self._entries:
                self._entries.remove(entry)
                self._ring(entry.where)
            if entry.users:
                return False
        # The group still holds them and destroys them without the GIL: gloo then waits for its thread.
        entry.made = []
        return True

    def _forked(self) -> None:
        self._inherited += self._entries
        self._entries, self._leases, self._forks = [], 0, self._forks + 1
        self._waiting = []
        self._lock = threading.Lock()
        sockets.forked()


pool = DevicePool()
"""The process's devices."""
