"""Nodes that this one has lost, and when their seats may be given away. Pure.

The workers of a node that may only be partitioned from the others are to have ended before their seats are
another node's: such a node ends them itself (`rank_assignment.cut_off`), which takes it a while to find out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from multiworld.run.nodes.slots import Membership

__all__ = ["FENCE", "ORPHANS_GRACE", "STORE_CALL", "Fence", "Losses"]

ORPHANS_GRACE = 0.0
"""Seconds that workers of several nodes have once their launcher is gone: its seat is given away at once."""

STORE_CALL = 2.0
"""Seconds that the rendezvous store has to answer; a partitioned node finds that out in this time."""

FENCE = STORE_CALL + 1.0
"""Seconds between the removal of a silent node and the takeover of its seat, in a store outside the nodes.

Such a node may reach the store while it sees no other one: it ends its workers when it reads of its removal,
which it does every 0.1 s, or when a call has not ended in time.
"""

_GRACE = 3.0
"""Seconds beyond `STORE_CALL` that a node which may be partitioned has to end its workers."""

_MAJORITY = 1.0
"""Seconds for which half of the nodes let a majority, where there is one elsewhere, decide first."""

_EACH_SEES = 1.0
"""Seconds for each node to see the loss itself, where no store tells what one has decided."""

_SLOW_LEADER = 10.0
"""Seconds after which another node decides, where the leader has not seen the loss itself."""


_GONE = {"crashed", "left"}
"""Causes that the lost node's own kernel has told."""


@dataclass(frozen=True)
class _Loss:
    cause: str
    at: float


class Losses:
    """See the module.

    A loss belongs to the link that ended: a node that was removed, or admitted again, is not lost any more,
    and one that a membership lists by mistake still is.

    Args:
        hang_timeout: seconds after which a silent node counts as hung.
    """

    def __init__(self, hang_timeout: float) -> None:
        self._hang_timeout = hang_timeout
        self._links: dict[tuple[str, int], _Loss] = {}  # of all links that have ended, by node and epoch
        self._present: dict[str, _Loss] = {}  # of nodes that the present membership lists

    @property
    def causes(self) -> dict[str, str]:
        """Ids of the lost nodes that the present membership lists, and why each link ended."""
        return {node: loss.cause for node, loss in self._present.items()}

    @property
    def silent(self) -> set[str]:
        """Ids of those of them whose workers may run."""
        return {node for node, loss in self._present.items() if loss.cause not in _GONE}

    @property
    def connects(self) -> float:
        """Seconds that a node has to connect with another one: if it takes longer, it does not see that one.

        The other nodes may be connected with each other already, and with this one: what was cut off
        meanwhile is lost to them, and `due` in them does not wait for connections. A launcher that stands
        still for so long loses its workers (`multiworld.run.workers.orphan_reaper`).
        """
        return max(2 * self._hang_timeout, self._hang_timeout + _GRACE)

    def add(self, node: str, epoch: int, cause: str, at: float) -> None:
        """A link of the present membership has ended, at `at` in ``time.monotonic()`` seconds."""
        self._present[node] = self._links[node, epoch] = _Loss(cause, at)

    def follow(self, links: Collection[tuple[str, int]]) -> None:
        """There is a newer membership, with these links: nodes and epochs."""
        self._present = {key[0]: loss for key, loss in self._links.items() if key in links}

    def forget(self) -> None:
        """This node is in no membership."""
        self._present.clear()

    def may_run(self, nodes: Iterable[str], now: float) -> tuple[str, ...]:
        """Return those of the nodes whose workers may still run at `now`; any thread.

        Args:
            nodes: ids of nodes that the present membership lists.
            now: ``time.monotonic()`` seconds.
        """
        present = self._present.copy()
        over = {id_ for id_, loss in present.items() if loss.at + self._patience(loss.cause) <= now}
        return tuple(id_ for id_ in nodes if id_ not in over)

    def due(self, membership: Membership, *, decides: bool, answers: bool) -> float:
        """Return when this node gives the seats of the lost ones away, in ``time.monotonic()`` seconds.

        Args:
            membership: the present one, of which some are lost.
            decides: whether this node is the leader.
            answers: whether the rendezvous store does.
        """
        due = max(loss.at + self._patience(loss.cause) for loss in self._present.values())
        if 2 * (len(membership.nodes) - len(self._present)) <= len(membership.nodes):
            due += _MAJORITY
        if not answers:
            return due + _EACH_SEES
        return due if decides else due + _SLOW_LEADER

    def _patience(self, cause: str) -> float:
        """Seconds after which the workers of a lost node have ended in any case."""
        if cause in _GONE:
            return 0.0
        return max(2 * self._hang_timeout, self._hang_timeout + STORE_CALL + _GRACE)


class Fence:
    """Seats of nodes that were removed as silent ones: they are kept for `FENCE`, where the store is outside.

    Such a seat still has its holder, in a membership that does not list that node.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def follow(self, before: Membership | None, after: Membership, now: float) -> None:
        """There is a newer membership, since `now` in ``time.monotonic()`` seconds."""
        gone = {slot.holder for slot in after.slots if slot.holder and after.node(slot.holder) is None}
        new = {node.id: now for node in (() if before is None else before.nodes)}
        self._since = {id_: at for id_, at in {**new, **self._since}.items() if id_ in gone}

    def kept(self, now: float | None = None) -> set[str]:
        """Return the holders of these seats; at `now`: of those that are not free yet."""
        return {id_ for id_, at in self._since.items() if now is None or now < at + FENCE}

    def over(self, now: float, done: Collection[str] = ()) -> bool:
        """Whether one of the seats is free; `done`: ids of nodes whose workers have ended with 0."""
        return not self.kept() - self.kept(now) <= set(done)
