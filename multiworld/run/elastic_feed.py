"""Worlds and workers in torch elastic's own events and metrics, beside those that its agent makes.

They go where the run's options send torch's: events to the handler of ``--event-log-handler`` (nowhere where
torch has no such option), metrics to the handler that the program configured for the group "multiworld".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.metrics.api import put_metric

from multiworld.run.events import NodeLost, WorkerRestarting, WorldChanged
from multiworld.run.view.renumbering import Renumbering

if TYPE_CHECKING:
    from multiworld.run.events import RunEvent

__all__ = ["GROUP", "ElasticFeed"]

GROUP = "multiworld"
"""Group of the metrics."""

_LEFT = "left"
_MOST = 512


class ElasticFeed:
    """A subscriber of the run's events.

    Args:
        destination: name of torch's handler of events.
        node: this host's name.
        run_id: of the run.
    """

    def __init__(self, destination: str, node: str, run_id: str) -> None:
        self._destination = destination
        self._common = {"node": node, "run_id": run_id}
        self._broken: dict[str, int] = {}
        self._renumbering = Renumbering()

    def __call__(self, event: RunEvent) -> None:
        """Record one event."""
        if self._renumbering.begins(event) and isinstance(event, WorldChanged):
            self._broken.pop(event.world, None)
        match event:
            case WorldChanged(state="broken", cause=cause) if cause != _LEFT:
                if self._first(event):
                    put_metric(f"worlds.broken.{cause or 'unknown'}", 1, GROUP)
                self._record(
                    "multiworld.world.broken", event.at, **_of(event), cause=cause, detail=event.detail
                )
            case WorldChanged(state="active"):
                self._record("multiworld.world.active", event.at, **_of(event), size=event.size)
            case WorldChanged(state="failed"):
                put_metric("worlds.joins_failed", 1, GROUP)
                self._record("multiworld.world.join_failed", event.at, **_of(event), detail=event.detail)
            case WorkerRestarting(rank=rank, attempt=attempt):
                put_metric("workers.restarts", 1, GROUP)
                self._record("multiworld.worker.restarting", event.at, rank=rank, attempt=attempt)
            case NodeLost(cause=cause):
                put_metric(f"nodes.lost.{cause}", 1, GROUP)
                self._record("multiworld.node.lost", event.at, lost=event.node, cause=cause)

    def _first(self, event: WorldChanged) -> bool:
        """Whether no other member has told of this breakage."""
        known = self._broken.pop(event.world, -1)
        self._broken[event.world] = max(known, event.generation)
        if len(self._broken) > _MOST:
            del self._broken[next(iter(self._broken))]  # the one that broke longest ago
        return event.generation > known

    def _record(self, name: str, at: float, **metadata: str | int) -> None:
        fields: dict[str, str | int | float | bool | None] = {**self._common, **metadata}
        record(Event(name, EventSource.AGENT, int(at * 1000), fields), self._destination)


def _of(event: WorldChanged) -> dict[str, str | int]:
    return {"world": event.world, "generation": event.generation, "rank": event.rank}
