"""Events of the other nodes, in order: some are heard before the agent's loop handles them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from multiworld.run.nodes.interface import Over, Reassigned, Stop

if TYPE_CHECKING:
    from multiworld.run.nodes.interface import NodeEvent, Nodes
    from multiworld.run.nodes.slots import Assignment

__all__ = ["NodeEvents", "same_ranks"]


def same_ranks(one: Assignment | None, other: Assignment) -> bool:
    """Whether the workers of two assignments have the same ranks."""
    return one is not None and (one.slot, one.base_rank) == (other.slot, other.base_rank)


class NodeEvents:
    """The events of `Nodes.poll`, each taken once.

    Args:
        nodes: gives them. Only one thread calls it, and this object.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._waiting: deque[NodeEvent] = deque()

    def take(self) -> NodeEvent | None:
        """Return the next event; None if there is none. Never blocks."""
        self._waiting.extend(self._nodes.poll())
        return self._waiting.popleft() if self._waiting else None

    def void(self, assignment: Assignment | None) -> bool:
        """Whether workers of this assignment are not to start: an event that waits ends them, or the run."""
        self._waiting.extend(self._nodes.poll())
        return any(
            not same_ranks(assignment, each.assignment)
            if isinstance(each, Reassigned)
            else isinstance(each, Over | Stop)
            for each in self._waiting
        )
