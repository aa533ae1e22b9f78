"""Renumbering of a world's generations: from 1 again, since all its processes had ended. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld.run.events import WorkerStarted, WorldChanged

if TYPE_CHECKING:
    from multiworld.run.events import RunEvent

__all__ = ["Renumbering"]

_MOST = 512  # worlds that are remembered; the one that broke longest ago is forgotten first


class Renumbering:
    """Looks at the events of a run.

    A process that was started after a generation had broken is never active in that one, nor in an earlier
    one. If it says so, then its world is another one of the same name.
    """

    def __init__(self) -> None:
        self._started: dict[int, float] = {}  # by rank
        self._broken: dict[str, tuple[int, float]] = {}  # the highest generation that broke, and when

    def begins(self, event: RunEvent) -> bool:
        """Take an event in; return whether its world begins anew with it."""
        match event:
            case WorkerStarted(at=at, rank=rank):
                self._started[rank] = at
            case WorldChanged(state="broken", at=at, world=world, generation=generation):
                known = self._broken.pop(world, (0, at))
                self._broken[world] = known if known[0] >= generation else (generation, at)
                if len(self._broken) > _MOST:
                    del self._broken[next(iter(self._broken))]
            case WorldChanged(state="active", at=at, world=world, generation=generation, rank=rank):
                number, when = self._broken.get(world, (0, at))
                if generation <= number and self._started.get(rank, when) > when:
                    del self._broken[world]
                    return True
        return False
