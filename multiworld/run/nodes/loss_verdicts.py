"""Verdicts on lost nodes: their seats are given away, or this node gives up its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld.run.nodes import rank_assignment
from multiworld.run.nodes.asking import Asking
from multiworld.run.nodes.losses import Fence, Losses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from multiworld.run.nodes.slots import Membership
    from multiworld.run.nodes.standing import Standing

__all__ = ["CutOff", "LossVerdicts"]


class CutOff:
    """This node can reach neither the rendezvous store nor a majority of the others."""


class LossVerdicts:
    """See the module. Used by one thread, `may_run` and `silent` by any.

    Args:
        hang_timeout: see `NodesSpec`.
        told: see `Asking`.
        outside: whether the rendezvous store is on none of the nodes.

    Attributes:
        losses: of the present membership.
        asking: the other launchers, where no store tells what they have lost.
    """

    def __init__(
        self, hang_timeout: float, told: Callable[[float], list[dict[str, Any]]], *, outside: bool
    ) -> None:
        self.losses = Losses(hang_timeout)
        self.asking = Asking(told)
        self._fence = Fence()
        self._outside = outside

    def follow(
        self, old: Membership | None, new: Membership, links: Collection[tuple[str, int]], now: float
    ) -> None:
        """There is a newer membership, with these links: nodes and epochs."""
        if self._outside:
            self._fence.follow(old, new, now)
        self.losses.follow(links)

    def may_run(self, nodes: Iterable[str], now: float) -> tuple[str, ...]:
        """See `Losses.may_run`."""
        return self.losses.may_run(nodes, now)

    def silent(self, nodes: Iterable[str], now: float) -> tuple[str, ...]:
        """Return the ids of nodes whose workers may run: those of `nodes`, and of some that were removed."""
        return (*self.losses.may_run(nodes, now), *self._fence.kept(now))

    def silent_holders(self, membership: Membership, now: float, *, answers: bool) -> set[str]:
        """Return ids of nodes that may run, and keep their slots when they are removed or were."""
        if not self._outside:
            return set()
        if not answers:  # each node decides on its own, and at another time
            return self._fence.kept()
        silent = {id_ for id_ in self.losses.silent if membership.slot_of(id_) is not None}
        return silent | self._fence.kept(now)

    def judge(
        self,
        standing: Standing,
        membership: Membership,
        unmade: Collection[str],
        now: float,
        *,
        answers: bool,
    ) -> Membership | CutOff | None:
        """Return the membership without the lost nodes once that is due, or that this node is cut off.

        Args:
            standing: of this node.
            membership: the present one.
            unmade: ids of the nodes that were not connected in time.
            now: ``time.monotonic()`` seconds.
            answers: whether the rendezvous store does: then it decides which membership counts.
        """
        causes, me, finished = self.losses.causes, standing.me, standing.finished
        unseen = {**dict.fromkeys(unmade, "unreachable"), **causes}
        if rank_assignment.cut_off(membership, me, unseen, finished, answers=answers, outside=self._outside):
            return CutOff()
        decides = rank_assignment.leader(membership, causes) == me
        if causes:
            due = now >= self.losses.due(membership, decides=decides, answers=answers)
        else:
            due = decides and answers and self._fence.over(now, finished)
        if not due:
            return None
        holders = self.silent_holders(membership, now, answers=answers)
        after = rank_assignment.leave(membership, causes, finished, holders)
        if answers or after.slot_of(me) == membership.slot_of(me):
            return after
        # What looks like a silent node may be a broken link to it.
        silent = self.losses.silent
        gone = (causes.keys() - silent) | self.asking.agreed(membership, me, silent, now)
        return rank_assignment.leave(membership, gone, finished, holders) if gone else None
