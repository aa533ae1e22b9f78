"""Worlds that the workers of this node are members of, as they report it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from multiworld._join.arguments import LAST_CALL
from multiworld.run.events import WorkerEnded, WorkerFailed, WorkerStarted, WorkerStopped, WorldChanged
from multiworld.run.worldsfile.worlds_plan import LAUNCHER

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.run.events import RunEvent
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["WorkingWorlds"]


class WorkingWorlds:
    """The worlds of a range that meet at the launcher's store, and which of this node's workers are in them.

    A worker is a member while its world is active, and for the world's last call after that: so long members
    of a broken world are waited for. One that has closed it, or has ended, is none.

    Args:
        plan: of the worlds file; None: there are no such worlds.
        clock: monotonic seconds.

    Attributes:
        names: of these worlds.
    """

    def __init__(self, plan: WorldsPlan | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._last_calls = {
            world.name: LAST_CALL if world.last_call is None else world.last_call
            for world in (plan.worlds if plan is not None else ())
            if world.assigned and world.store == LAUNCHER
        }
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[tuple[str, int], float | None] = {}  # since when it is not active; None: it is

    @property
    def names(self) -> tuple[str, ...]:
        """See the class."""
        return tuple(self._last_calls)

    def hear(self, event: RunEvent) -> None:
        """Take in an event of the run, in any thread."""
        match event:
            case WorldChanged(rank=rank, world=world, state=state) if world in self._last_calls:
                with self._lock:
                    if state == "closed":
                        self._members.pop((world, rank), None)
                    elif state == "active":
                        self._members[world, rank] = None
                    elif self._members.get((world, rank), 0.0) is None:
                        self._members[world, rank] = self._clock()
            case (
                WorkerStarted(rank=rank)
                | WorkerEnded(rank=rank)
                | WorkerFailed(rank=rank)
                | WorkerStopped(rank=rank)
            ):
                with self._lock:
                    for world in self._last_calls:
                        self._members.pop((world, rank), None)

    def members(self) -> dict[str, list[int]]:
        """Return the ranks, in the run, of the workers that are members of each world."""
        now, found = self._clock(), dict[str, list[int]]()
        with self._lock:
            for (world, rank), since in sorted(self._members.items()):
                if since is None or now - since < self._last_calls[world]:
                    found.setdefault(world, []).append(rank)
        return found
