"""One round of the rendezvous store, followed: the memberships in it, and applications for admission."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from multiworld.run.nodes import slots
from multiworld.run.nodes.agreement import admissions, newest_membership
from multiworld.run.nodes.applications import Applications

if TYPE_CHECKING:
    from multiworld.run.nodes.rendezvous_store import RendezvousStore
    from multiworld.run.nodes.slots import Membership, Node

__all__ = ["StoreRound"]


class StoreRound:
    """See the module; each method raises `StoreSilentError` where the store does not answer.

    Args:
        store: of the round.
        number: of the membership in it that this node has adopted.

    Attributes:
        store, number: as given; the latter follows `newer` and `decide`.
        applications: which of them are still to be read.
    """

    def __init__(self, store: RendezvousStore, number: int) -> None:
        self.store, self.number = store, number
        self.applications = Applications()

    def newer(self) -> Membership | None:
        """Return the newest membership, to be adopted now; None where there is no newer one."""
        found = newest_membership(self.store, self.number)
        if found is None:
            return None
        self.number = found[0]
        return found[1]

    def decide(self, membership: Membership) -> Membership | None:
        """Write a membership under the next number; return what is to be adopted now.

        That is another one if another node was first; None where its writer is gone, or slow.
        """
        for number in (self.number + 1, self.number + 2):
            if self.store.add("membership", number, slots.to_json(membership)):
                self.number = number
                return membership
            found = self.newer()
            if found is not None:
                return found
            # Claimed but not written.
        return None

    def applicants(self) -> tuple[list[int], list[Node]]:
        """Return the numbers of the applications that are there, and the nodes that are to be admitted."""
        come: dict[str, Node] = {}
        read: list[int] = []
        for number in self.applications.due():
            data = self.store.read(f"apply/{number}")
            if data is None:
                continue
            read.append(number)
            with contextlib.suppress(KeyError, TypeError, ValueError):  # it is no application
                node = slots.record_from(data).node
                come[node.id] = node  # the last one counts
        # A leader before this one has read some of them, and what they asked for may be long over.
        since = admissions(self.store, self.number) if come else {}
        return read, [node for node in come.values() if since.get(node.id, 0) <= node.since]
