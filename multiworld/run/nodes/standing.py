"""A node's standing: the membership that it knows, and its own place in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld.run.nodes import rank_assignment

if TYPE_CHECKING:
    from collections.abc import Collection

    from multiworld.run.nodes.slots import Assignment, Membership, Node

__all__ = ["Adopted", "Standing"]


@dataclass(frozen=True)
class Adopted:
    """What has changed with a newer membership that this node is in.

    Attributes:
        old: membership before; None: it was in none.
        before: assignment before; None: it had none yet.
        assignment: now.
        gone: nodes of the old one that are not in the new one.
        joined: nodes that are new in it, or have another slot, with the slot of each.
        again: whether this node was done and has another slot now: a node that did not know of it gave its
            seat away, and the work is done again.
    """

    old: Membership | None
    before: Assignment | None
    assignment: Assignment
    gone: tuple[Node, ...]
    joined: tuple[tuple[Node, int | None], ...]
    again: bool


class Standing:
    """See the module. One thread changes it; others may read each attribute.

    Args:
        me: id of this node.

    Attributes:
        me: as given.
        membership: the latest; None: this node is in none.
        epoch: of the latest that it was in; 0: there was none.
        assignment: its own; set after `membership`.
        master: see `Assignment`; for the next one.
        finished: ids of the nodes whose workers, as far as it knows, have ended with 0.
        idle: whether all workers of its seat were retired: the seat is another node's once it leaves.
    """

    def __init__(self, me: str) -> None:
        self.me = me
        self.membership: Membership | None = None
        self.epoch = 0
        self.assignment: Assignment | None = None
        self.master: tuple[str, int] | None = None
        self.finished: set[str] = set()
        self.idle = False

    @property
    def done(self) -> bool:
        """Whether the workers of this node have ended with 0."""
        return self.me in self.finished

    def adopt(self, membership: Membership) -> Adopted | None:
        """Take in a newer membership; None, and nothing changes, where this node is not in it."""
        if membership.node(self.me) is None:
            return None
        before, old = self.assignment, self.membership
        self.membership, self.epoch = membership, membership.epoch
        if old is not None:
            # Done, but the node that decided does not know of it: the ranks of their seats run again.
            others = self.finished - {self.me}
            self.finished -= {
                id_ for id_ in others if old.slot_of(id_) not in {None, membership.slot_of(id_)}
            }
        self.finished.update(membership.done)
        assignment = self.assignment = rank_assignment.assignment(membership, self.me, self.master)
        moved = before is not None and before.slot != assignment.slot
        again = moved and self.done
        if moved:
            self.finished.discard(self.me)
            self.idle = False
        known = {} if old is None else {each.id: (each.since, old.slot_of(each.id)) for each in old.nodes}
        return Adopted(
            old,
            before,
            assignment,
            gone=tuple(each for each in (old.nodes if old else ()) if membership.node(each.id) is None),
            joined=tuple(
                (node, slot)
                for node in membership.nodes
                if node.id != self.me
                and known.get(node.id) != (node.since, slot := membership.slot_of(node.id))
            ),
            again=again,
        )

    def leave(self) -> Membership | None:
        """This node is in no membership any more; return the one that it was in."""
        left, self.membership = self.membership, None
        return left

    def lose_seat(self) -> Assignment | None:
        """Return what is left of its assignment without the seat; None where it had none, or is done."""
        before = self.assignment
        if before is None or before.slot is None or self.done:
            return None
        self.assignment = before.without_slot()
        self.idle = False
        return self.assignment

    def over(
        self, membership: Membership, lost: Collection[str], idle: Collection[str] = ()
    ) -> tuple[int, ...] | None:
        """Return the ranks of the free slots if the run is over for this node, else None.

        Args:
            membership: the present one.
            lost: ids of its nodes that this one has lost.
            idle: ids of others whose workers were all retired. They matter to a node that is idle itself:
                it is done then, and says so; a node that is done waits for that.
        """
        idle = {self.me, *idle} if self.idle else ()
        free = rank_assignment.over(membership, self.finished, lost, idle)
        return free if membership.slot_of(self.me) is None or self.done or self.idle else None

    def stranded(self, membership: Membership) -> tuple[int, ...]:
        """Return the ranks of the free slots if this node alone is left, and idle; else none.

        Args:
            membership: the present one.
        """
        alone = self.idle and {node.id for node in membership.nodes} == {self.me}
        return rank_assignment.vacant(membership) if alone else ()
