"""What the agent of one node knows of the other nodes: where it sits, who was lost, when the run is over.

The agent's thread calls all of it, and nothing but `Nodes.settle` and `Nodes.close` takes time. What happens
between the calls is found by threads of the implementation, and waits in `Nodes.poll` for the agent:

    seating = nodes.settle(handler.next_rendezvous())      # start the workers of seating.seat, if it has one
    while True:
        select([..., nodes.fileno()], timeout=monitor_interval)
        nodes.watch()
        for event in nodes.poll():
            Seated: seat None -> end all workers at once (SIGKILL, no grace: somebody may have the ranks next);
                    another seat than before -> start its workers; the same seat -> new addresses for later starts
            Lost:   nothing to do; the log has it already
            Stop:   end the workers and the run with an error
            Over:   end the agent; its workers have ended long since
        if all own workers have ended with 0 (once): nodes.done()
    nodes.close()                      # or close(failed="rank 3 failed ...") when this node ends the whole run

`make_nodes` is for runs of several nodes; `multiworld.run.nodes.single` is the same for a single one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from multiworld.run.nodes.slots import Seating

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from multiworld.run.events import Happenings
    from multiworld.run.worldsfile.spec import WorldsPlan

__all__ = ["Lost", "NodeEvent", "Nodes", "NodesSpec", "Over", "Seated", "Seating", "Stop", "make_nodes"]


@dataclass(frozen=True)
class NodeEvent:
    """Base of what `Nodes.poll` returns."""


@dataclass(frozen=True)
class Lost(NodeEvent):
    """Another node's agent is gone.

    Attributes:
        node: host name.
        seat: that it had; None: it was a spare.
        cause: "crashed", "hung", "unreachable" or "left".
        ranks: of its workers.
        worlds: names of the planned worlds that cannot be whole until somebody takes the seat.
    """

    node: str
    seat: int | None
    cause: str
    ranks: tuple[int, ...]
    worlds: tuple[str, ...]


@dataclass(frozen=True)
class Seated(NodeEvent):
    """This node's place has changed, or an address in it.

    Attributes:
        seating: from now on. Seat None: end all workers at once, without a grace period.
        reason: for the log, in a sentence; empty where nothing but addresses changed.
    """

    seating: Seating
    reason: str = ""


@dataclass(frozen=True)
class Stop(NodeEvent):
    """The run has to end with an error: another node ended it, or a node was lost under --on-node-loss stop."""

    reason: str


@dataclass(frozen=True)
class Over(NodeEvent):
    """Every node that is still there has ended its workers with 0: the run is over.

    Attributes:
        lost: ranks whose node was lost and whose seat nobody took; the run's exit code is 0 only if this is empty.
    """

    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodesSpec:
    """What a node brings, and what was asked for.

    Attributes:
        run_id: of the rendezvous.
        endpoint: of the rendezvous ("host:port"); tells which of this host's addresses the others can reach.
        local_addr: this host's address where the user gave one (--local-addr).
        min_nodes, max_nodes: of --nnodes.
        capacity: workers that this node can have (--nproc-per-node); its seat may have fewer.
        role: this node's --role; not looked at where there is a plan.
        on_loss: "continue" or "stop".
        hang_timeout: seconds without a sign of life after which a node's agent counts as lost.
        timeout: seconds that an agreement after a rendezvous may take.
    """

    run_id: str
    endpoint: str
    local_addr: str | None
    min_nodes: int
    max_nodes: int
    capacity: int
    role: str = "default_role"
    on_loss: str = "continue"
    hang_timeout: float = 5.0
    timeout: float = 60.0


class Nodes(Protocol):
    """The other nodes, as the agent sees them."""

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something."""

    def settle(self, info: RendezvousInfo) -> Seating:
        """Agree with the others who sits where; after the first ``next_rendezvous()``, which the agent calls.

        Later rendezvous are called here, in the background, while the workers run.

        Raises:
            RunError: the others did not agree within ``NodesSpec.timeout``, or all that may come have no room for the
            workers of the worlds file.
        """

    def poll(self) -> list[NodeEvent]:
        """What happened since the last call. Never blocks."""

    def watch(self) -> None:
        """Look, in the background, for nodes that wait to be let in. At every monitor interval. Never blocks."""

    def done(self) -> None:
        """Tell the others that this node's workers have all ended with 0. Never blocks; once is enough."""

    def close(self, failed: str = "") -> None:
        """Leave the others, within 3 s. Harmless when repeated.

        Args:
            failed: why this node ends the run for all; empty: it only leaves (after `Over`, or asked by a signal),
                and the others treat it as lost where it was not done.
        """


def make_nodes(
    spec: NodesSpec, handler: RendezvousHandler, happenings: Happenings, plan: WorldsPlan | None = None
) -> Nodes:
    """Return the other nodes of a run of several.

    Args:
        spec: what this node brings.
        handler: its rendezvous; `Nodes` calls ``next_rendezvous`` and ``num_nodes_waiting`` of it, in threads of
            its own, after the agent's first ``next_rendezvous``. The agent shuts it down.
        happenings: gets NodeJoined, NodeLost, SeatTaken and notes.
        plan: of the worlds file.
    """
    from multiworld.run.nodes.multi import ManyNodes  # noqa: PLC0415  (torch and sockets: not for --nnodes 1)

    return ManyNodes(spec, handler, happenings, plan)
