"""News of the other nodes, and of seats that no node has, as a launcher tells them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld.run.errors import RunError
from multiworld.run.events import NodeLost
from multiworld.run.nodes import rank_assignment
from multiworld.run.nodes.interface import Lost, Stop

if TYPE_CHECKING:
    from multiworld.run.nodes.slots import Membership, Node
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["NodeNews"]


@dataclass(frozen=True)
class NodeNews:
    """See the module.

    Attributes:
        plan: of the worlds file.
        on_loss: see `NodesSpec`.
        max_nodes: of the run.
    """

    plan: WorldsPlan | None
    on_loss: str
    max_nodes: int

    def missed(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the ranks without a node that the run cannot do without."""
        return ranks if self.plan is None else self.plan.missed(ranks)

    def lost(self, membership: Membership, node: Node, cause: str, at: float) -> tuple[NodeLost, Lost]:
        """Return what the run and the agent are told of a lost node.

        Args:
            membership: that lists it.
            node: the node.
            cause: see `Lost`.
            at: ``time.time()`` seconds.
        """
        slot = membership.slot_of(node.id)
        ranks = () if slot is None else membership.ranks_of(slot)
        worlds = () if self.plan is None else self.plan.worlds_without(ranks)
        return NodeLost(at, node.host, slot, cause, worlds), Lost(node.host, slot, cause, ranks, worlds)

    def vacant(self, old: Membership | None, membership: Membership) -> Stop | str:
        """Return what follows from ranks that have no node any more: the end, or a warning; "": nothing.

        Args:
            old: membership before; None: there was none.
            membership: now.
        """
        was = set(self.missed(rank_assignment.vacant(old))) if old is not None else set()
        vacant = self.missed(rank_assignment.vacant(membership))
        ranks = tuple(rank for rank in vacant if rank not in was)
        if not ranks:
            return ""
        worlds = self.plan.worlds_without(ranks) if self.plan is not None else ()
        what = f"no node for rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        if worlds:
            what += f": world{'s' if len(worlds) > 1 else ''} {', '.join(worlds)} cannot be whole"
        if self.on_loss == "stop" and old is not None:
            return Stop(what)
        return f"{what}; the rest goes on, and a node that comes gets the place"

    def room(self, membership: Membership) -> str:
        """Return a warning if the first nodes have no room for all workers of the worlds file; "": they have.

        Raises:
            RunError: and no other node can come.
        """
        plan = self.plan
        if plan is None or membership.epoch != 1:
            return ""
        ranks = self.missed(rank_assignment.vacant(membership))
        if not ranks:
            return ""
        brought = ", ".join(f"{node.host}: {node.capacity}" for node in membership.nodes)
        room = plan.world_size - len(rank_assignment.vacant(membership))
        value = f"{plan.least_workers} workers of {plan.path}, and the nodes have room for {room} ({brought})"
        if len(membership.nodes) >= self.max_nodes:
            raise RunError(
                value,
                rule="The --nproc-per-node of all nodes together is at least the number of workers",
                next_step="Leave --nproc-per-node out, or change it or --nnodes",
            )
        return f"{value}: ranks {ranks[0]} to {ranks[-1]} start when another node comes"
