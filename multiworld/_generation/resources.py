"""The resources of one generation, and their release: each once, in order, by one thread."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from multiworld._core.membership.state_sources import latest
from multiworld._generation.every_step import take_from
from multiworld._net.stores.rendezvous import least_pause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld._c10d.groups import Group
    from multiworld._c10d.routing.state import WorldState
    from multiworld._core.membership.roster import Roster
    from multiworld._generation.busy_members import BusyMembers
    from multiworld._net.lane.endpoint import Endpoint
    from multiworld._net.liveness.attachment import Attachment
    from multiworld._net.stores.rendezvous import Rendezvous
    from multiworld._net.stores.store import StoreHandle
    from multiworld._net.stores.torchstore import PollingStore

__all__ = ["UNDO_BUDGET", "Holdings", "Resources", "keys_of"]

UNDO_BUDGET = 2.0
"""Seconds that releasing what a failed join made may take."""

STORE_LOOK = 1.0
"""Seconds between two looks at whether others use a store that a broken generation served."""

READ_WITHIN = 0.05
"""Seconds from a generation's begin in which a store that this process serves is not closed: members that
were ready earlier are reading there that all are. In large worlds twice the time between two reads."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Everything that a join made. A value: nothing in it is replaced later.

    Attributes:
        roster: the members, this process's rank, the generation's number.
        attachment: the generation's place in the watchdog.
        busy: the members that run and do not answer.
        c10d: what the router selects for the generation.
        group: the process group and its sub-groups.
        rendezvous: the generation's record in the store.
        store: this generation's hold on the store.
        group_store: what the process group was built over.
        lane: the connections for messages; None where they go through gloo.
        steps: as in the roster; where all have agreed on the advance at which it begins, that one.
    """

    roster: Roster
    attachment: Attachment
    busy: BusyMembers
    c10d: WorldState
    group: Group
    rendezvous: Rendezvous
    store: StoreHandle
    group_store: PollingStore
    lane: Endpoint | None
    steps: tuple[int | None, ...] = ()

    @property
    def step(self) -> int:
        """How many advances its members have made: the most of any."""
        return latest(self.steps)

    @property
    def keys(self) -> list[str]:
        """What this member has set in the store for the process group."""
        return keys_of(self.rendezvous, self.group_store)


def keys_of(rendezvous: Rendezvous, group_store: PollingStore | None) -> list[str]:
    """Name what a process group has set in the store so far; nothing where it is not begun."""
    return [] if group_store is None else [f"{rendezvous.prefix}/{key}" for key in group_store.written]


class Holdings:
    """The resources that a generation still holds.

    Args:
        resources: all of them.

    Attributes:
        resources: all of them; None once a thread releases them.
    """

    def __init__(self, resources: Resources) -> None:
        self._lock = threading.Lock()
        self.resources: Resources | None = resources
        self._releasing: Resources | None = None  # as long as not all of it is: a release may be interrupted
        self._store: StoreHandle | None = resources.store
        self._unfreed: Group | None = None  # what is being freed, or a close left behind that ran out of time
        self._aborter: threading.Timer | None = None
        self._released = threading.Event()
        self._untold: Rendezvous | None = None
        size = resources.roster.size
        reading = max(READ_WITHIN, 2 * least_pause(size)) if size > 1 else 0.0
        self._read_by_all = time.monotonic() + reading

    def abort(self, delay: float = 0.0, lost: Iterable[int] = ()) -> None:
        """Let pending operations raise, at once or after `delay` seconds.

        Args:
            delay: see above.
            lost: ranks of members whose processes do not answer: nor does a store that they serve.
        """
        resources = self.resources  # a close in another thread may take it meanwhile
        if resources is None:
            return
        if not delay:
            _end_operations(resources)
            resources.store.doubt({resources.roster.members[rank].process for rank in lost})
            return
        timer = self._aborter = threading.Timer(delay, _end_operations, (resources,))
        timer.daemon = True
        timer.name = f"m8d-abort-{resources.roster.world}"
        try:
            timer.start()
        except RuntimeError:  # the host has no thread left for this process
            _end_operations(resources)

    def drain(self, deadline: float) -> None:
        """Wait until the other members have received what was sent to them, at most until `deadline`."""
        resources = self.resources
        if resources is not None and resources.lane is not None:
            resources.lane.drain(deadline, resources.attachment.ask_to_read)

    def release(self, deadline: float, *, left: bool = False, again: bool = False) -> None:
        """Release all but a store that this process serves.

        Args:
            deadline: ``time.monotonic()`` seconds.
            left: whether this process leaves the world, and will not be in its next generation.
            again: whether its claim of a place in that one is to tell the store that this one is over.
        """
        with self._lock:
            if self.resources is not None:
                self._releasing = self.resources
                self.resources = None
            resources = self._releasing
        if resources is None:
            return
        if self._aborter is not None:
            self._aborter.cancel()
        self._unfreed = resources.group  # also if Ctrl-C comes while it is freed
        free = partial(self._free, resources, deadline)
        steps: list[Callable[[], object]] = [
            partial(_end_operations, resources),
            free,
            resources.c10d.forget,
            partial(self._note_over, resources, left=left, again=again),
            partial(self._release_store_of_others, resources),
            self._is_released,
        ]
        # Only the one that waits for the group's destructors is ended by Ctrl-C.
        repeated = [each for each in steps if each is not free]
        take_from(resources.roster.world, steps, lambda step: step(), repeated)

    def _is_released(self) -> None:
        self._released.set()
        self._releasing = None

    def _free(self, resources: Resources, deadline: float) -> None:
        if resources.group.close(deadline):
            resources.store.idle()
            self._unfreed = None

    def _note_over(self, resources: Resources, *, left: bool, again: bool) -> None:
        # The store may be the very thing that died; nothing depends on this mark.
        with contextlib.suppress(Exception):
            if again:
                self._untold = resources.rendezvous
                resources.rendezvous.forget(resources.keys)
            else:
                resources.rendezvous.over(resources.keys, left=left)

    def _release_store_of_others(self, resources: Resources) -> None:
        if not resources.store.serves:
            self.release_store()

    def tell_over(self) -> None:
        """Tell the store that the generation is over for this process, after a `release` that left it out."""
        untold, self._untold = self._untold, None
        if untold is not None:
            untold.over()

    def await_release(self, deadline: float) -> None:
        """Wait until another thread has released all, and free what it could not."""
        if not self._released.wait(max(0.0, deadline - time.monotonic())):
            return
        unfreed = self._unfreed
        if unfreed is not None and unfreed.close(deadline):
            self._unfreed = None

    @property
    def freed(self) -> bool:
        """Whether all is released, and the group's destructors are through."""
        return self._released.is_set() and self._unfreed is None

    # -- the store -------------------------------------------------------------------------------------------

    def keep_store(self) -> Callable[[], None]:
        """Let the store outlive the generation, if others need it or it moves; returns what releases it."""
        with self._lock:
            store = self._store
            if store is None or not (store.serves or store.moves):
                return _nothing
            self._store = None
        return store.close

    def release_store(self) -> None:
        """Release the store, though others may use it."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            if store.serves:
                time.sleep(max(0.0, self._read_by_all - time.monotonic()))
            store.close()

    def release_spare_store(self) -> float | None:
        """Release the store unless others use it: then return the seconds until the next look."""
        store = self._store
        if store is None:
            return None
        if not store.spare():
            return STORE_LOOK
        self.release_store()
        return None

    # -- a forked child --------------------------------------------------------------------------------------

    def disown(self) -> tuple[object, ...]:
        """In a forked child: return the parent's resources, for the caller to keep, and hold none of them."""
        kept = (self.resources, self._releasing, self._store, self._unfreed, self._aborter, self._untold)
        self._lock, self._released = threading.Lock(), threading.Event()
        self._released.set()
        self.resources = self._releasing = self._store = self._unfreed = None
        self._aborter = self._untold = None
        return kept


def _end_operations(resources: Resources) -> None:
    """Let everything that is pending raise."""
    try:
        if resources.lane is not None:
            resources.lane.fail(ConnectionAbortedError("the world is over"))
    finally:
        resources.group.abort()


def _nothing() -> None:
    """There is no store to be released."""
