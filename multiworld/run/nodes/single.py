"""The other nodes of a run that has none: `multiworld.run.nodes.interface.Nodes` for a single node."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from multiworld.run.events import SeatTaken
from multiworld.run.nodes.interface import Over
from multiworld.run.nodes.slots import Seating
from multiworld.run.nodes.world_store import WorldStore

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from multiworld.run.events import Happenings
    from multiworld.run.nodes.interface import NodeEvent

__all__ = ["OneNode"]


class OneNode:
    """Seat 0 of 1.

    Args:
        capacity: number of workers.
        happenings: gets `SeatTaken`.
        serve: address to serve the planned worlds' store at; None: there is no plan.
    """

    def __init__(self, capacity: int, happenings: Happenings, *, serve: str | None) -> None:
        self._capacity = capacity
        self._happenings = happenings
        self._store = None if serve is None else WorldStore(serve)
        self._ours, self._theirs = socket.socketpair()
        self._events: list[NodeEvent] = []

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something."""
        return self._ours.fileno()

    def settle(self, info: RendezvousInfo) -> Seating:
        """Take the only seat."""
        seating = Seating(
            seat=info.rank,
            base_rank=info.rank * self._capacity,
            world_size=info.world_size * self._capacity,
            nodes=info.world_size,
            size=self._capacity,
            store="" if self._store is None else self._store.address,
        )
        self._happenings.publish(SeatTaken(time.time(), seating.seat, seating.nodes))
        return seating

    def poll(self) -> list[NodeEvent]:
        """`Over`, once, after `done`."""
        events, self._events = self._events, []
        if events:
            self._ours.recv(16)
        return events

    def watch(self) -> None:
        """Nobody waits to be let in."""

    def done(self) -> None:
        """The run is over with this node's workers."""
        self._events.append(Over())
        self._theirs.send(b".")

    def close(self, failed: str = "") -> None:
        """End the store of planned worlds; `failed` has nobody to be told to."""
        del failed
        if self._store is not None:
            self._store.close()
            self._store = None
