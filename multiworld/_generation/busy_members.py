"""The members of one generation that run, but give no sign of life."""

from __future__ import annotations

import threading
import time

from multiworld.events import MemberBusy, bus

__all__ = ["BusyMembers"]


class BusyMembers:
    """Who is busy at the moment, as the watchdog says.

    Args:
        world: name.
        generation: its number.
        rank: of this process.

    Attributes:
        ranks: of the busy members, ascending.
    """

    def __init__(self, world: str, generation: int, rank: int) -> None:
        self._world = world
        self._generation = generation
        self._rank = rank
        self._lock = threading.Lock()
        self.ranks: tuple[int, ...] = ()

    def note(self, ranks: tuple[int, ...], busy: bool) -> None:
        """Members do not answer (`busy`), or answer again. Called by the watchdog's thread."""
        with self._lock:
            others = tuple(rank for rank in self.ranks if rank not in ranks)
            self.ranks = tuple(sorted({*others, *ranks})) if busy else others
        bus.publish(MemberBusy(self._world, self._generation, self._rank, time.monotonic(), ranks, busy))
