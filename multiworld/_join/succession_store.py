"""The store in which members agree on the next generation, also when it went away and is served again."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from multiworld._generation.background_release import releaser
from multiworld._generation.resources import STORE_LOOK
from multiworld._net.stores.address import is_list
from multiworld.errors import MultiworldError
from multiworld.events import State

if TYPE_CHECKING:
    from multiworld._generation.generation import Generation
    from multiworld._net.stores.store import StoreHandle
    from multiworld._net.stores.succession import Succession
    from multiworld.world import World

__all__ = ["SuccessionStore"]

RELEASE_DELAY = 1.0
"""Seconds after a breakage until it is looked whether what stands in is used: a join may come at once."""


class SuccessionStore:
    """See the module.

    Args:
        world: whose generations succeed each other.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._spare: StoreHandle | None = None  # in the place of a store that went away
        self._spare_of = ""  # that store's address
        self._moving = threading.Lock()

    def begin(self) -> None:
        """The world was joined anew: what stood in for another store than its present one is closed."""
        if self._spare_of != self._world._plan.meets_at:
            self.close()

    def broke(self, gen: Generation) -> None:
        """The world's generation `gen` broke: what stands in is closed in the background, as its store is."""
        if self._spare is not None:
            releaser.add(RELEASE_DELAY, lambda: self._release(gen))

    def _release(self, gen: Generation) -> float | None:
        """Close what stands in, unless others use it; return the seconds until the next look."""
        world, spare = self._world, self._spare
        if spare is None or gen is not world._gen:
            return None
        # A join that is under way may be at this store, and others wait there for this member's.
        if world.state is State.JOINING or not spare.spare():
            return STORE_LOOK
        self.close()
        return None

    def close(self) -> None:
        """Close what was opened here."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def forked(self) -> None:
        """In a forked child: it is the parent's."""
        self._spare, self._moving = None, threading.Lock()

    def of(self, gen: Generation) -> Succession:
        """Return what this member writes of `gen` in the store.

        Raises:
            BrokenWorldException, WorldClosedError: the generation is over.
        """
        from multiworld._net.stores.succession import Succession  # only who advances needs it

        resources, roster = gen.resources, gen.roster
        if resources is None:
            raise gen.error()
        request = replace(
            resources.rendezvous.request,
            past=roster.members,
            past_generation=roster.generation,
            past_rank=roster.rank,
            lost=(),
            working=True,
        )
        return Succession((self._spare or resources.store).store, request)

    def follow(self, gen: Generation) -> None:
        """Open the launcher's store where it is now, if it has moved since it was opened."""
        resources, plan = gen.resources, self._world._plan
        if plan.present is None or resources is None:
            return
        with self._moving:
            if plan.meets_at != (self._spare or resources.store).address:
                self._open()

    def reopen(self) -> None:
        """Look for the store again: another process may serve it by now, or this one."""
        with self._moving:
            self._open()

    def _open(self) -> None:
        from multiworld._net.stores.opening import open_in_time

        plan = self._world._plan
        store = plan.meets_at
        if not isinstance(store, str) or is_list(store):  # a list moves by itself
            return
        # OSError, RuntimeError: the host has no descriptor or thread left now.
        with contextlib.suppress(MultiworldError, OSError, RuntimeError):
            found = open_in_time(
                store,
                world=plan.name,
                serve=not plan.served,
                only=False,
                deadline=time.monotonic() + 1.0,
                cancelled=lambda: False,
            )
            spare, self._spare, self._spare_of = self._spare, found, store
            if spare is not None:
                spare.close()
            # Meanwhile, and with it what was open here.
            if self._world.state is State.CLOSED:
                self.close()
            elif self._world.state is not State.ACTIVE:
                self.broke(self._world._gen)
