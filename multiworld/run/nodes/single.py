"""Single-node implementation of `multiworld.run.nodes.interface.Nodes`."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

from multiworld.run.events import SlotTaken
from multiworld.run.nodes.interface import Over
from multiworld.run.nodes.slots import Assignment
from multiworld.run.nodes.world_store import WorldStore

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from multiworld.run.events import EventBus
    from multiworld.run.nodes.interface import NodeEvent

__all__ = ["SingleNode"]


class SingleNode:
    """Slot 0 of 1.

    Args:
        capacity: number of workers, the largest.
        bus: gets `SlotTaken`.
        serve: address to serve the planned worlds' store at; None: there is no worlds file.
        starting: ranks of the workers that are started at first; None: all.
    """

    def __init__(
        self, capacity: int, bus: EventBus, *, serve: str | None, starting: tuple[int, ...] | None = None
    ) -> None:
        self._capacity = capacity
        self._bus = bus
        self._starting = starting
        self._store = None if serve is None else WorldStore(serve)
        self._ours, self._theirs = socket.socketpair()
        self._events: list[NodeEvent] = []

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something."""
        return self._ours.fileno()

    def settle(self, info: RendezvousInfo) -> Assignment:
        """Take the only slot."""
        assignment = Assignment(
            slot=info.rank,
            base_rank=info.rank * self._capacity,
            world_size=info.world_size * self._capacity,
            nodes=info.world_size,
            size=self._capacity,
            store="" if self._store is None else self._store.address,
            base_role_rank=info.rank * self._capacity,
            role_world_size=info.world_size * self._capacity,
            starting=self._starting,
        )
        self._bus.publish(SlotTaken(time.time(), assignment.slot, assignment.nodes))
        return assignment

    def poll(self) -> list[NodeEvent]:
        """`Over`, once, after `done`."""
        events, self._events = self._events, []
        if events:
            self._ours.recv(16)
        return events

    def watch(self) -> None:
        """Do nothing: no node can wait for admission."""

    def done(self) -> None:
        """The run is over with this node's workers."""
        self._events.append(Over())
        self._theirs.send(b".")

    def idle(self, *, yes: bool) -> None:
        """Do nothing: a role has a worker at least, and there is no other node for it."""

    def stood_still(self) -> None:
        """Do nothing: no other node could have the seat."""

    def snapshots(self, timeout: float) -> list[dict[str, Any]]:  # noqa: ARG002  (the signature of all nodes)
        """Return none: there is no other node."""
        return []

    def close(self, failed: str = "") -> None:
        """End the store of planned worlds; `failed` has no receiver."""
        del failed
        if self._store is not None:
            self._store.close()
            self._store = None
