"""Who sits where: the places of nodes in a run, who moves when a node is lost, and when a run is over. Pure.

A *seat* is a place for one node's workers, with ranks of its own. Who holds a seat keeps it as long as its agent
lives; a node without one is a spare. All of it stands in one `Table`, which the nodes agree on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = [
    "Card", "Chair", "Node", "Seating", "Table", "admit", "card_from", "cut_off", "leader", "leave", "meet",
    "over", "seating", "table_from", "to_json", "vacant",
]  # fmt: skip

_SILENT = {"hung", "unreachable", "failed"}
"""Causes that may as well be this node's own network: nothing proves that the other process has ended."""


@dataclass(frozen=True)
class Seating:
    """Where this node sits after a rendezvous.

    Attributes:
        seat: 0, 1, ...; None: a spare node, which starts no workers until a seat is free.
        base_rank: global rank of this seat's first worker (0 for a spare).
        world_size: number of workers of all seats.
        nodes: number of seats.
        store: address "tcp://host:port" of the store in which planned worlds meet, served by a launcher.
        base_role_rank: rank of the first worker among those of the same --role; without a worlds file.
        role_world_size: workers of that role; without a worlds file.
        master: host and port of torch's store for workers (MASTER_ADDR, MASTER_PORT) in the latest rendezvous.
        size: workers of this seat; None: as many as the node can have.
    """

    seat: int | None
    base_rank: int
    world_size: int
    nodes: int
    store: str
    base_role_rank: int = 0
    role_world_size: int = 0
    master: tuple[str, int] | None = None
    size: int | None = None


@dataclass(frozen=True)
class Node:
    """One agent.

    Attributes:
        id: 32 hex digits, drawn by the agent.
        host: name, for people.
        address, port: where its watchdog listens.
        pid: of the agent, for people.
        capacity: workers that it can have.
        role: that its workers have; "" where a worlds file deals the roles.
        store: address of the store that it serves, or would serve, for planned worlds.
        since: epoch of the table that let it in; a node that comes back has a new one.
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
class Chair:
    """One seat.

    Attributes:
        capacity: workers that belong to it, no more than its holder can have; never changes.
        role: see `Node`.
        holder: id of the node that has it; None: free.
        last: who had it before, and gets it back if it comes while the seat is free.
    """

    capacity: int
    role: str
    holder: str | None
    last: str | None = None


@dataclass(frozen=True)
class Table:
    """What the nodes agreed on.

    Attributes:
        epoch: 1, 2, ...: a later one replaces an earlier one.
        token: hex digits, drawn for the run, with which the agents know each other.
        keeper: id of the node whose store the planned worlds meet in.
        chairs: the seats, in order.
        nodes: all agents that are there, spares too; the first that lives decides for all.
    """

    epoch: int
    token: str
    keeper: str
    chairs: tuple[Chair, ...]
    nodes: tuple[Node, ...]

    def node(self, id_: str | None) -> Node | None:
        """Return the node of that id, if it is there."""
        return next((node for node in self.nodes if node.id == id_), None)

    def seat_of(self, id_: str) -> int | None:
        """Return its seat; None for a spare, and for who is not there."""
        return next((seat for seat, chair in enumerate(self.chairs) if chair.holder == id_), None)

    def ranks_of(self, seat: int) -> tuple[int, ...]:
        """Return the global ranks of a seat's workers."""
        first = sum(chair.capacity for chair in self.chairs[:seat])
        return tuple(range(first, first + self.chairs[seat].capacity))


@dataclass(frozen=True)
class Card:
    """What a node says of itself when the nodes meet.

    Attributes:
        node: who it is.
        table: the latest that it knows and is part of; None for one that comes, or has given up its seat.
        alive: ids of the nodes that it is connected with.
        done: ids of the nodes of which it knows that their workers have ended with 0.
    """

    node: Node
    table: Table | None = None
    alive: tuple[str, ...] = ()
    done: tuple[str, ...] = ()


# -- decisions


def meet(cards: Sequence[Card], *, counts: Sequence[int] | None, token: str) -> Table:
    """Return the table of nodes that met in a rendezvous.

    Args:
        cards: of those that came, by group rank.
        counts: workers of each role of the worlds file, in its order; None: a seat for each node that came at first.
        token: for a run that has none yet.
    """
    known = max((card.table for card in cards if card.table is not None), key=_epoch, default=None)
    epoch = 1 if known is None else known.epoch + 1
    came = {card.node.id: card for card in cards}
    alive = {id_ for card in cards for id_ in card.alive}
    nodes: list[Node] = []
    for node in known.nodes if known is not None else ():
        if node.id in came and came[node.id].table is not None:
            nodes.append(replace(came[node.id].node, since=node.since))
        elif node.id not in came and node.id in alive:
            nodes.append(node)  # it comes late, and lives: its seat is not free
    there = {node.id for node in nodes}
    nodes += [replace(card.node, since=epoch) for card in cards if card.node.id not in there]
    if known is None:
        chairs = _first_chairs(nodes, counts)
    else:
        token = known.token
        chairs = _vacated(known.chairs, there | {id_ for card in cards for id_ in card.done})
    return _made(epoch, token, "" if known is None else known.keeper, chairs, nodes)


def leave(table: Table, gone: Collection[str], done: Collection[str] = ()) -> Table:
    """Return the table after nodes were lost: spares that fit have the seats that became free.

    Args:
        table: the nodes until now.
        gone: ids of the lost ones.
        done: ids of nodes whose workers have ended with 0: their seats stay theirs, also when they are gone.
    """
    nodes = [node for node in table.nodes if node.id not in gone]
    chairs = _vacated(table.chairs, {node.id for node in nodes} | set(done))
    # Who is done had a seat: one that a table gave it which did not come here before its writer left.
    late = [
        node for node in table.nodes if node.id in done and node.id in gone and table.seat_of(node.id) is None
    ]
    chairs = _filled(chairs, late)
    return _made(table.epoch + 1, table.token, table.keeper, chairs, nodes)


def admit(table: Table, nodes: Sequence[Node]) -> Table:
    """Return the table after nodes came in another way than through a rendezvous."""
    epoch = table.epoch + 1
    new = {node.id for node in nodes}
    kept = [node for node in table.nodes if node.id not in new]
    chairs = _vacated(table.chairs, {node.id for node in kept})
    return _made(
        epoch, table.token, table.keeper, chairs, [*kept, *(replace(node, since=epoch) for node in nodes)]
    )


def leader(table: Table, lost: Collection[str]) -> str | None:
    """Return the id of the node that decides: the first that is not lost."""
    return next((node.id for node in table.nodes if node.id not in lost), None)


def cut_off(table: Table, me: str, lost: Mapping[str, str], *, answers: bool, outside: bool) -> bool:
    """Whether this node is the one that was cut off, and has to end its workers.

    Only where one of those out of sight may be alive: then those others may give this node's seat away. They do
    so where they are a majority, or half of the nodes and in reach of the rendezvous store; so this node has to go
    where it is in a minority, or in a half that cannot reach the store. A store on none of the nodes is the judge
    as long as it answers: the first table in it is right.

    Args:
        table: the nodes.
        me: this one's id.
        lost: cause of each that is out of sight.
        answers: whether the rendezvous store answers.
        outside: whether the store is served by none of the nodes.
    """
    gone = [lost[node.id] for node in table.nodes if node.id != me and node.id in lost]
    if not any(cause in _SILENT for cause in gone) or (answers and outside):
        return False
    in_sight = 2 * (len(table.nodes) - len(gone))
    return in_sight < len(table.nodes) or (in_sight == len(table.nodes) and not answers)


def over(table: Table, done: Collection[str], lost: Collection[str]) -> tuple[int, ...] | None:
    """Tell whether the run is over: every seat that is held has ended its work.

    Returns:
        Ranks of the seats that nobody holds; None as long as somebody works, or is lost and not judged yet.
    """
    if any(chair.holder is not None and chair.holder not in done for chair in table.chairs):
        return None
    if any(node.id in lost and node.id not in done for node in table.nodes):
        return None
    return vacant(table)


def vacant(table: Table) -> tuple[int, ...]:
    """Return the ranks of the seats that nobody holds."""
    free = [seat for seat, chair in enumerate(table.chairs) if chair.holder is None]
    return tuple(rank for seat in free for rank in table.ranks_of(seat))


def seating(table: Table, me: str, master: tuple[str, int] | None = None) -> Seating:
    """Return this node's place at the table."""
    seat = table.seat_of(me)
    keeper = table.node(table.keeper)
    before = table.chairs[: seat or 0]
    role = table.chairs[seat].role if seat is not None else None
    return Seating(
        seat=seat,
        base_rank=sum(chair.capacity for chair in before),
        world_size=sum(chair.capacity for chair in table.chairs),
        nodes=len(table.chairs),
        size=0 if seat is None else table.chairs[seat].capacity,
        store=keeper.store if keeper is not None else "",
        base_role_rank=sum(chair.capacity for chair in before if chair.role == role),
        role_world_size=sum(chair.capacity for chair in table.chairs if chair.role == role),
        master=master,
    )


def _epoch(table: Table) -> int:
    return table.epoch


def _first_chairs(nodes: Sequence[Node], counts: Sequence[int] | None) -> list[Chair]:
    """Seats for the first time: in order, as long as their workers are needed; the rest are free for who comes."""
    if counts is None:
        return [Chair(node.capacity, node.role, node.id, node.id) for node in nodes if node.capacity > 0]
    chairs: list[Chair] = []
    left = sum(counts)
    able = [node for node in nodes if node.capacity > 0]
    sizes = _even(able, left)
    for node in _by_role(able, counts):
        size = min(sizes.get(node.id, node.capacity), left)
        if size > 0:
            chairs.append(Chair(size, node.role, node.id, node.id))
            left -= size
    most = max((node.capacity for node in able), default=left)
    while left > 0:
        size = min(most, left)
        chairs.append(Chair(size, nodes[0].role if nodes else "", None))
        left -= size
    return chairs


def _even(nodes: Sequence[Node], total: int) -> dict[str, int]:
    """Shares of nodes that could all have the same number of workers, where those would not all be full.

    Full nodes and spares come first where that comes out even: a spare is worth more than an idle place.
    """
    capacities = {node.capacity for node in nodes}
    if len(capacities) != 1:
        return {}
    (capacity,) = capacities
    needed = -(-total // capacity)
    if total % capacity == 0 or needed > len(nodes):
        return {}
    least, more = divmod(total, needed)
    return {node.id: least + (at < more) if at < needed else 0 for at, node in enumerate(nodes)}


def _by_role(nodes: Sequence[Node], counts: Sequence[int]) -> Iterator[Node]:
    """Nodes in the order of their seats: where a role begins, one that can have just its workers comes first.

    So a hub's node of one worker has the hub, wherever it stands among nodes of eight.
    """
    left, begins = list(nodes), {sum(counts[:at]): count for at, count in enumerate(counts)}
    rank = 0
    while left:
        node = next((node for node in left if node.capacity == begins.get(rank)), left[0])
        left.remove(node)
        rank += node.capacity
        yield node


def _vacated(chairs: Sequence[Chair], there: Collection[str]) -> list[Chair]:
    return [
        chair
        if chair.holder is None or chair.holder in there
        else replace(chair, holder=None, last=chair.holder)
        for chair in chairs
    ]


def _filled(chairs: Sequence[Chair], spares: Sequence[Node]) -> list[Chair]:
    """Give free seats to those who fit."""
    filled, left = list(chairs), list(spares)
    for own in (True, False):  # who comes back has its own seat before anybody else has it
        for seat, chair in enumerate(filled):
            if chair.holder is not None:
                continue
            fits = [
                node
                for node in left
                if node.capacity >= chair.capacity
                and node.role == chair.role
                and (not own or node.id == chair.last)
            ]
            fits.sort(key=lambda node: node.capacity)  # the larger may be needed elsewhere
            if fits:
                filled[seat] = replace(chair, holder=fits[0].id, last=fits[0].id)
                left.remove(fits[0])
    return filled


def _made(epoch: int, token: str, keeper: str, chairs: Sequence[Chair], nodes: Sequence[Node]) -> Table:
    filled = _filled(chairs, [node for node in nodes if node.id not in {chair.holder for chair in chairs}])
    ids = {node.id for node in nodes}
    if keeper not in ids:
        # It moves only when it has to: worlds that have met in a store would have to look for the next one.
        seated = [chair.holder for chair in filled if chair.holder in ids]
        keeper = next((id_ for id_ in seated if id_ is not None), nodes[0].id if nodes else "")
    return Table(epoch, token, keeper, tuple(filled), tuple(nodes))


# -- as text, for the rendezvous store


def to_json(record: Card | Table | Node) -> dict[str, Any]:
    """Return a record as what JSON can say."""
    return asdict(record)


def table_from(data: Mapping[str, Any]) -> Table:
    """Return the table that `to_json` gave.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    return Table(
        int(data["epoch"]),
        str(data["token"]),
        str(data["keeper"]),
        tuple(Chair(**chair) for chair in data["chairs"]),
        tuple(Node(**node) for node in data["nodes"]),
    )


def card_from(data: Mapping[str, Any]) -> Card:
    """Return the card that `to_json` gave.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    table = data["table"]
    return Card(
        Node(**data["node"]),
        None if table is None else table_from(table),
        tuple(map(str, data["alive"])),
        tuple(map(str, data["done"])),
    )
