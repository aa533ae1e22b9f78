"""`Nodes`, an agent's interface to the other nodes: assignments, losses, the end of the run.

The agent's thread makes all calls, and only `Nodes.settle` and `Nodes.close` take time. Threads of the
implementation watch the other nodes meanwhile; their events wait in `Nodes.poll`:

    assignment = nodes.settle(handler.next_rendezvous())   # start the workers of its slot, if it has one
    while True:
        select([..., nodes.fileno()], timeout=monitor_interval)
        nodes.watch()
        for event in nodes.poll():
            Reassigned: slot None -> end all workers at once (SIGKILL, no grace: another node may get the
            ranks next);
                        another slot than before -> start its workers; the same slot -> new addresses, for
                        later starts, or other slots are free than before
            Lost:   nothing to do; the log has it already
            Stop:   end the workers and the run with an error
            Over:   end the agent; its workers have ended long since
        if all own workers were ended for it, because this launcher stood still: nodes.stood_still()
        if all own workers have ended with 0 (once): nodes.done()
        if all own workers were retired, or there are some again: nodes.idle(yes=...)
    nodes.close()                   # or close(failed="rank 3 failed ...") when this node ends the whole run

`multiworld.run.nodes.multi` implements it for runs of several nodes, `multiworld.run.nodes.single` for one
node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from multiworld.run.nodes.slots import Assignment

__all__ = ["LifeSigns", "Lost", "NodeEvent", "Nodes", "NodesSpec", "Over", "Reassigned", "Stop"]


@dataclass(frozen=True)
class NodeEvent:
    """Base of the events that `Nodes.poll` returns."""


@dataclass(frozen=True)
class Lost(NodeEvent):
    """Another node's agent is gone.

    Attributes:
        node: host name.
        slot: that it had; None: it was a spare.
        cause: "crashed", "hung", "unreachable" or "left".
        ranks: of its workers.
        worlds: names of the planned worlds that cannot be whole until another node takes the slot.
    """

    node: str
    slot: int | None
    cause: str
    ranks: tuple[int, ...]
    worlds: tuple[str, ...]


@dataclass(frozen=True)
class Reassigned(NodeEvent):
    """This node's assignment has changed, or an address in it, or which slots are free.

    Attributes:
        assignment: from now on. Slot None: end all workers at once, without a grace period.
        reason: for the log, in a sentence; empty where the slot stays the same.
    """

    assignment: Assignment
    reason: str = ""


@dataclass(frozen=True)
class Stop(NodeEvent):
    """The run has to end: another node ended it, or a node was lost under --on-node-loss stop.

    Attributes:
        reason: for the log.
        alone: only this node has to end; the others go on.
    """

    reason: str
    alone: bool = False


@dataclass(frozen=True)
class Over(NodeEvent):
    """The workers of every remaining node have ended with 0, or were all retired: the run is over.

    Attributes:
        lost: ranks whose node was lost and whose slot stayed free; the run's exit code is 0 only if this is
            empty.
    """

    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodesSpec:
    """A node's own values, and the run's options.

    Attributes:
        run_id: of the rendezvous.
        endpoint: of the rendezvous ("host:port"); tells which of this host's addresses the others can reach.
        local_addr: this host's address where the user gave one (--local-addr).
        min_nodes, max_nodes: of --nnodes.
        capacity: workers that this node can have (--nproc-per-node); its slot may have fewer.
        role: this node's --role; unused with a worlds file.
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


class LifeSigns(Protocol):
    """Gets the signs of life of a `Nodes`; without them this node's workers are ended. See `ReaperClient`."""

    def alive(self) -> None:
        """The other nodes are watched, and this one's seat is not lost unnoticed."""

    def seatless(self) -> None:
        """This node has lost its seat, and its agent has not polled since: the workers are to end."""

    def free(self) -> None:
        """There will be no more signs, and the workers may go on: the run ends for all nodes."""


class Nodes(Protocol):
    """The other nodes of a run."""

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something."""

    def settle(self, info: RendezvousInfo) -> Assignment:
        """Agree on rank assignment; after the first ``next_rendezvous()``, which the agent calls.

        Later rendezvous are called here, in the background, while the workers run.

        Raises:
            RunError: the nodes did not agree within ``NodesSpec.timeout``, or together have no room for the
                workers of the worlds file.
        """

    def poll(self) -> list[NodeEvent]:
        """Return the events since the last call. Never blocks."""

    def watch(self) -> None:
        """Check for nodes that wait for admission, at every monitor interval. Never blocks."""

    def done(self) -> None:
        """Tell the others that all workers of this node have ended with 0. Never blocks; once is enough."""

    def idle(self, *, yes: bool) -> None:
        """Tell whether all workers of this node were retired, and none has ended with 0. Never blocks.

        Such a node keeps its seat until it leaves, and may start workers again; the run ends without them
        once the workers of another node have ended with 0, and no other node has any that run.
        """

    def stood_still(self) -> None:
        """Give the seat up, and request one anew: the workers were ended meanwhile. Never blocks."""

    def snapshots(self, timeout: float) -> list[dict[str, Any]]:
        """Ask the other nodes' launchers for their snapshots. Any thread but those of the implementation.

        Args:
            timeout: seconds that they have to answer.

        Returns:
            Those of the ones that answered, in no order.
        """

    def close(self, failed: str = "") -> None:
        """Leave the others, within 4 s. Harmless when repeated.

        A node that is done or ends the run waits up to 10 s for its connections first, to tell the others.

        Args:
            failed: why this node ends the run for all; empty: it only leaves (after `Over`, or on a signal),
                and the others treat it as lost where it was not done.
        """
