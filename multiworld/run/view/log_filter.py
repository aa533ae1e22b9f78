"""The log without ``--verbose``: which events have a line, and the counts of the last line. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld.run.events import (
    RunStarted,
    SlotTaken,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarting,
    WorkerRetiring,
    WorkerStarted,
    WorkerStopped,
    WorldChanged,
)
from multiworld.run.view.renumbering import Renumbering

if TYPE_CHECKING:
    from multiworld.run.events import RunEvent

__all__ = ["LogFilter"]

_BAD = {"broken", "failed"}
_MOST = 512  # worlds that are remembered; the one that was told first is forgotten first


class LogFilter:
    """Picks the events that have a line: starts, failures, restarts, worlds that broke or healed.

    A world has one line when the first member reports that a generation broke (or could not be joined), and
    one when it is active again. A worker that ended or was stopped is in the summary only, unless it was
    retired.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._workers: set[int] = set()
        self._retiring: set[int] = set()
        self._failures = self._restarts = self._broken = 0
        self._told: dict[str, set[tuple[str, int]]] = {}  # of worlds that are not active again
        self._renumbering = Renumbering()

    def picks(self, event: RunEvent) -> bool:
        """Count `event`; return whether it has a line in a log that is not verbose."""
        anew = self._renumbering.begins(event)
        match event:
            case RunStarted(at=at):
                self._began = at
            case WorkerStarted(rank=rank):
                self._workers.add(rank)
                self._retiring.discard(rank)
            case WorkerFailed():
                self._failures += 1
            case WorkerRestarting():
                self._restarts += 1
            case WorkerRetiring(rank=rank):
                self._retiring.add(rank)
            case SlotTaken(slot=slot, nodes=nodes):
                return slot is None or nodes > 1
            case WorkerEnded(rank=rank) | WorkerStopped(rank=rank):
                return rank in self._retiring
            case WorldChanged():
                return self._world(event, anew=anew)
        return True

    def summary(self, at: float) -> dict[str, Any]:
        """Return the counts of the run.

        Args:
            at: end of the run, ``time.time()`` seconds.

        """
        return {
            "seconds": round(max(0.0, at - (at if self._began is None else self._began)), 1),
            "workers": len(self._workers),
            "failures": self._failures,
            "restarts": self._restarts,
            "worlds_broken": self._broken,
        }

    def _world(self, change: WorldChanged, *, anew: bool) -> bool:
        told = self._told.get(change.world, set())
        if change.state in _BAD and change.cause != "left":
            what = (change.state, change.generation)
            if what in told:
                return False
            self._broken += change.state == "broken"
            self._told.setdefault(change.world, set()).add(what)
            if len(self._told) > _MOST:
                del self._told[next(iter(self._told))]
            return True
        healed = change.state == "active" and (
            anew or change.generation > max((number for _, number in told), default=change.generation)
        )
        if healed:
            self._told.pop(change.world, None)
        return healed
