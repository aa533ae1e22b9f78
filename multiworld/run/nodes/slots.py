"""Records of a run's nodes: slots, membership, a node's assignment; their form as JSON. Pure.

A *slot* is a place for one node's workers, with ranks of its own; the log, ``status`` and the pages call it a
seat. Its holder keeps it as long as that node's agent lives; a node without a slot is a spare. One
`Membership`, on which the nodes agree, has all slots and nodes. `multiworld.run.nodes.rank_assignment`
changes it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Assignment", "Membership", "Node", "NodeRecord", "Slot", "membership_from", "record_from", "to_json",
]  # fmt: skip


@dataclass(frozen=True)
class Assignment:
    """This node's slot and ranks.

    Attributes:
        slot: 0, 1, ...; None: a spare node, which starts no workers until a slot is free.
        base_rank: global rank of this slot's first worker (0 for a spare).
        world_size: number of workers of all slots.
        nodes: number of slots.
        store: address "tcp://host:port" of the store in which planned worlds meet, served by a launcher.
        base_role_rank: rank of the first worker among those of the same --role; without a worlds file.
        role_world_size: workers of that role; without a worlds file.
        master: host and port of torch's store for workers (MASTER_ADDR, MASTER_PORT) in the latest
            rendezvous.
        size: workers of this slot; None: as many as the node can have.
        starting: global ranks of the workers that are started at first; None: all of the slot.
        vacant: global ranks of the slots that no node has.
    """

    slot: int | None
    base_rank: int
    world_size: int
    nodes: int
    store: str
    base_role_rank: int = 0
    role_world_size: int = 0
    master: tuple[str, int] | None = None
    size: int | None = None
    starting: tuple[int, ...] | None = None
    vacant: tuple[int, ...] = ()

    def without_slot(self) -> Assignment:
        """Return what is left of it when the node has lost its slot."""
        return replace(self, slot=None, base_rank=0, base_role_rank=0, role_world_size=0)


@dataclass(frozen=True)
class Node:
    """One agent.

    Attributes:
        id: 32 hex digits, drawn by the agent.
        host: name, for people.
        address, port: where its watchdog listens.
        pid: of the agent, for people.
        capacity: workers that it can have.
        role: of its workers; "" where a worlds file assigns the roles.
        store: address of the store that it serves, or would serve, for planned worlds.
        since: epoch of the membership that admitted it; a node that comes back has a new one.
    """

    id: str
    host: str
    address: str
    port: int
    pid: int
    capacity: int
    role: str
    store: str
    since: int = 0


@dataclass(frozen=True)
class Slot:
    """One place for a node's workers.

    Attributes:
        capacity: workers that belong to it, at most what its holder can have; never changes.
        role: see `Node`.
        holder: id of the node that has it; None: free.
        last: id of its last holder, which gets it back if it returns while the slot is free.
    """

    capacity: int
    role: str
    holder: str | None
    last: str | None = None


@dataclass(frozen=True)
class Membership:
    """Slots and nodes of the run, as agreed on.

    Attributes:
        epoch: 1, 2, ...: a later one replaces an earlier one.
        token: hex digits, drawn for the run, by which the agents authenticate each other.
        store_node: id of the node that serves the store in which planned worlds meet.
        slots: in order.
        nodes: all agents, spares too; the first that lives is the leader.
        done: ids of the holders that are not among them, and whose workers have ended with 0: no link tells a
            node of it that came later.
    """

    epoch: int
    token: str
    store_node: str
    slots: tuple[Slot, ...]
    nodes: tuple[Node, ...]
    done: tuple[str, ...] = ()

    def node(self, id_: str | None) -> Node | None:
        """Return the node of that id, if it is there."""
        return next((node for node in self.nodes if node.id == id_), None)

    def slot_of(self, id_: str) -> int | None:
        """Return the slot of a node; None for a spare or an unknown node."""
        return next((number for number, slot in enumerate(self.slots) if slot.holder == id_), None)

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """Return the global ranks of a slot's workers."""
        first = sum(slot.capacity for slot in self.slots[:number])
        return tuple(range(first, first + self.slots[number].capacity))


@dataclass(frozen=True)
class NodeRecord:
    """What a node publishes of itself after a rendezvous.

    Attributes:
        node: itself.
        membership: the latest that it knows and is part of; None for a new node, or one that gave up its
            slot.
        alive: ids of the nodes that it is connected with.
        done: ids of the nodes whose workers, as far as it knows, have ended with 0.
        silent: ids of the nodes that it is not connected with, and whose workers may still run; also of some
            that were removed.
    """

    node: Node
    membership: Membership | None = None
    alive: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


def to_json(record: NodeRecord | Membership | Node) -> dict[str, Any]:
    """Return a record as plain data for JSON."""
    return asdict(record)


def membership_from(data: Mapping[str, Any]) -> Membership:
    """Return the membership that `to_json` gave.

    Raises:
        KeyError, TypeError, ValueError: `data` is no membership.
    """
    return Membership(
        int(data["epoch"]),
        str(data["token"]),
        str(data["store_node"]),
        tuple(Slot(**slot) for slot in data["slots"]),
        tuple(Node(**node) for node in data["nodes"]),
        tuple(map(str, data.get("done", ()))),  # earlier versions do not write it
    )


def record_from(data: Mapping[str, Any]) -> NodeRecord:
    """Return the node record that `to_json` gave.

    Raises:
        KeyError, TypeError, ValueError: `data` is no node record.
    """
    membership = data["membership"]

    return NodeRecord(
        Node(**data["node"]),
        None if membership is None else membership_from(membership),
        tuple(map(str, data["alive"])),
        tuple(map(str, data["done"])),
        tuple(map(str, data.get("silent", ()))),  # earlier versions do not write it
    )
