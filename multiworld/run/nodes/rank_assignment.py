"""Decisions on a run's slots: rank assignment, takeover after a loss, partitions, the end of a run. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from multiworld.run.nodes.slots import Assignment, Membership, Slot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from multiworld.run.nodes.slots import Node, NodeRecord

__all__ = ["admit", "assignment", "cut_off", "form", "leader", "leave", "over", "vacant"]

_SILENT = {"hung", "unreachable", "failed"}
"""Causes that a failure of this node's own network explains as well: the other process may live."""


def form(records: Sequence[NodeRecord], *, counts: Sequence[int] | None, token: str) -> Membership:
    """Return the membership after a rendezvous.

    A node that did not take part keeps its slot while its workers may run: those that lost it remove it when
    it has had the time to end them (`losses.Losses`).

    Args:
        records: of the nodes that took part, by group rank.
        counts: workers of each role of the worlds file, in its order; None: a slot for each node of the first
            rendezvous.
        token: for a run that has none yet.
    """
    known = max(
        (record.membership for record in records if record.membership is not None), key=_epoch, default=None
    )
    epoch = 1 if known is None else known.epoch + 1
    came = {record.node.id: record for record in records}
    runs = {id_ for record in records for id_ in (*record.alive, *record.silent)}
    nodes: list[Node] = []
    for node in known.nodes if known is not None else ():
        if node.id in came and came[node.id].membership is not None:
            nodes.append(replace(came[node.id].node, since=node.since))
        elif node.id not in came and node.id in runs:
            nodes.append(node)  # its slot is not free, and its link is the one that it had
    there = {node.id for node in nodes}
    nodes += [replace(record.node, since=epoch) for record in records if record.node.id not in there]
    if known is None:
        return _made(epoch, token, "", _first_slots(nodes, counts), nodes, ())
    done = {*known.done, *(id_ for record in records for id_ in record.done)}
    slots = _vacated(known.slots, there | runs | done)
    return _made(epoch, known.token, known.store_node, slots, nodes, done)


def leave(
    membership: Membership, gone: Collection[str], done: Collection[str] = (), silent: Collection[str] = ()
) -> Membership:
    """Return the membership after nodes were lost: spares that fit take the slots that became free.

    Args:
        membership: before.
        gone: ids of the lost nodes.
        done: ids of nodes whose workers have ended with 0: they keep their slots, also when they are gone.
        silent: ids of nodes whose workers may run, for which the same holds.
    """
    done = {*membership.done, *done}
    nodes = [node for node in membership.nodes if node.id not in gone]
    slots = _vacated(membership.slots, {node.id for node in nodes} | done | set(silent))
    # A node that is done had a slot: a membership gave it that did not arrive here before its writer left.
    late = [
        node
        for node in membership.nodes
        if node.id in done and node.id in gone and membership.slot_of(node.id) is None
    ]
    slots = _filled(slots, late)
    return _made(membership.epoch + 1, membership.token, membership.store_node, slots, nodes, done)


def admit(
    membership: Membership, nodes: Sequence[Node], done: Collection[str] = (), silent: Collection[str] = ()
) -> Membership:
    """Return the membership after nodes applied for admission outside a rendezvous.

    Args:
        membership: before.
        nodes: that applied.
        done: see `leave`.
        silent: see `leave`.
    """
    done = {*membership.done, *done}
    epoch = membership.epoch + 1
    new = {node.id for node in nodes}
    kept = [node for node in membership.nodes if node.id not in new]
    slots = _vacated(membership.slots, {node.id for node in kept} | done | set(silent))
    return _made(
        epoch,
        membership.token,
        membership.store_node,
        slots,
        [*kept, *(replace(node, since=epoch) for node in nodes)],
        done,
    )


def leader(membership: Membership, lost: Collection[str]) -> str | None:
    """Return the id of the leader, the first node that is not lost; None if all are."""
    return next((node.id for node in membership.nodes if node.id not in lost), None)


def cut_off(
    membership: Membership,
    me: str,
    lost: Mapping[str, str],
    done: Collection[str] = (),
    *,
    answers: bool,
    outside: bool,
) -> bool:
    """Whether this node is partitioned from the others, and has to end its workers.

    Only if one of the lost nodes may be alive: then those others may give this node's slot away. They do so
    as a majority, or as half of the nodes that reaches the rendezvous store; so this node has to stop in a
    minority, or in a half that cannot reach the store. A store on none of the nodes arbitrates as long as it
    answers: the first membership in it counts. A node whose workers have ended with 0 has none to end, and
    keeps its slot: the others may have finished and left, and be no majority any more.

    Args:
        membership: of the run.
        me: this node's id.
        lost: cause of each lost node.
        done: ids of nodes whose workers have ended with 0.
        answers: whether the rendezvous store answers.
        outside: whether the store is served by none of the nodes.
    """
    gone = [lost[node.id] for node in membership.nodes if node.id != me and node.id in lost]
    if me in done or not any(cause in _SILENT for cause in gone) or (answers and outside):
        return False
    in_sight = 2 * (len(membership.nodes) - len(gone))
    return in_sight < len(membership.nodes) or (in_sight == len(membership.nodes) and not answers)


def over(
    membership: Membership, done: Collection[str], lost: Collection[str], idle: Collection[str] = ()
) -> tuple[int, ...] | None:
    """Tell whether the run is over: the workers of every held slot have ended with 0, or were retired.

    Args:
        membership: of the run.
        done: ids of nodes whose workers have ended with 0.
        lost: ids of nodes that were lost.
        idle: ids of nodes whose workers were all retired; nothing has ended with them alone.

    Returns:
        Ranks of the free slots; None while workers run, or may run again, or a loss is not decided yet.
    """
    held = {slot.holder for slot in membership.slots if slot.holder is not None}
    if not held <= {*done, *idle} or (held and held.isdisjoint(done)):
        return None
    if any(node.id in lost and node.id not in done for node in membership.nodes):
        return None
    return vacant(membership)


def vacant(membership: Membership) -> tuple[int, ...]:
    """Return the ranks of the free slots."""
    free = [number for number, slot in enumerate(membership.slots) if slot.holder is None]
    return tuple(rank for number in free for rank in membership.ranks_of(number))


def assignment(membership: Membership, me: str, master: tuple[str, int] | None = None) -> Assignment:
    """Return this node's assignment."""
    number = membership.slot_of(me)
    store_node = membership.node(membership.store_node)
    before = membership.slots[: number or 0]
    role = membership.slots[number].role if number is not None else None
    return Assignment(
        slot=number,
        base_rank=sum(slot.capacity for slot in before),
        world_size=sum(slot.capacity for slot in membership.slots),
        nodes=len(membership.slots),
        size=0 if number is None else membership.slots[number].capacity,
        store=store_node.store if store_node is not None else "",
        base_role_rank=sum(slot.capacity for slot in before if slot.role == role),
        role_world_size=sum(slot.capacity for slot in membership.slots if slot.role == role),
        master=master,
        vacant=vacant(membership),
    )


def _epoch(membership: Membership) -> int:
    return membership.epoch


def _first_slots(nodes: Sequence[Node], counts: Sequence[int] | None) -> list[Slot]:
    """Slots of a new run: for the nodes in order, then free ones until all workers have a place."""
    if counts is None:
        return [Slot(node.capacity, node.role, node.id, node.id) for node in nodes if node.capacity > 0]
    slots: list[Slot] = []
    left = sum(counts)
    able = [node for node in nodes if node.capacity > 0]
    sizes = _even(able, left)
    for node in _by_role(able, counts):
        size = min(sizes.get(node.id, node.capacity), left)
        if size > 0:
            slots.append(Slot(size, node.role, node.id, node.id))
            left -= size
    most = max((node.capacity for node in able), default=left)
    while left > 0:
        size = min(most, left)
        slots.append(Slot(size, nodes[0].role if nodes else "", None))
        left -= size
    return slots


def _even(nodes: Sequence[Node], total: int) -> dict[str, int]:
    """Even shares for nodes of one capacity, if the workers would not fill all needed nodes.

    Full nodes and spares are preferred where the division comes out even: a spare is worth more than idle
    capacity.
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
    """Nodes in the order of their slots; a role begins with a node of just its size, if there is one.

    So a hub of one worker gets the node of capacity one, wherever that node stands among nodes of eight.
    """
    left, begins = list(nodes), {sum(counts[:at]): count for at, count in enumerate(counts)}
    rank = 0
    while left:
        node = next((node for node in left if node.capacity == begins.get(rank)), left[0])
        left.remove(node)
        rank += node.capacity
        yield node


def _vacated(slots: Sequence[Slot], there: Collection[str]) -> list[Slot]:
    return [
        slot if slot.holder is None or slot.holder in there else replace(slot, holder=None, last=slot.holder)
        for slot in slots
    ]


def _filled(slots: Sequence[Slot], spares: Sequence[Node]) -> list[Slot]:
    """Give free slots to the spares that fit."""
    filled, left = list(slots), list(spares)
    for own in (True, False):  # a returning node has priority for its own slot
        for number, slot in enumerate(filled):
            if slot.holder is not None:
                continue
            fits = [
                node
                for node in left
                if node.capacity >= slot.capacity
                and node.role == slot.role
                and (not own or node.id == slot.last)
            ]
            fits.sort(key=lambda node: node.capacity)  # best fit: the larger may be needed for a larger slot
            if fits:
                filled[number] = replace(slot, holder=fits[0].id, last=fits[0].id)
                left.remove(fits[0])
    return filled


def _made(
    epoch: int,
    token: str,
    store_node: str,
    slots: Sequence[Slot],
    nodes: Sequence[Node],
    done: Collection[str],
) -> Membership:
    filled = _filled(slots, [node for node in nodes if node.id not in {slot.holder for slot in slots}])
    ids = {node.id for node in nodes}
    if store_node not in ids:
        # It moves only when it has to: worlds that met in the old store have to look for the new one.
        holders = [slot.holder for slot in filled if slot.holder in ids]
        store_node = next((id_ for id_ in holders if id_ is not None), nodes[0].id if nodes else "")
    away = (slot.holder for slot in filled if slot.holder not in ids)
    gone = tuple(id_ for id_ in away if id_ is not None and id_ in done)
    return Membership(epoch, token, store_node, tuple(filled), tuple(nodes), gone)
