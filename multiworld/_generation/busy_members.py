"""The members of one generation that run, but give no sign of life."""

from __future__ import annotations

import threading
import time

from multiworld.events import MemberBusy, bus
from multiworld.logs.source import about, logger

__all__ = ["BusyMembers"]

_log = logger(__name__)


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
        which, extra = ", ".join(map(str, ranks)), about(self._world, self._generation, self._rank)
        if busy:
            _log.warning("world %r: ranks %s run, but give no sign of life", self._world, which, extra=extra)
        else:
            _log.info("world %r: ranks %s answer again", self._world, which, extra=extra)
        bus.publish(MemberBusy(self._world, self._generation, self._rank, time.monotonic(), ranks, busy))
