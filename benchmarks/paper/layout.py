"""Layout of worlds: which process shares which one with which, in each of the paper's ways. Pure."""

from __future__ import annotations

from typing import NamedTuple

SENDERS = 3
"""The most that one leader has, as in the paper."""
LEADER = 0
SINGLE, MULTI, PROCESS = "single", "multi", "process"
TOPOLOGIES = (SINGLE, MULTI, PROCESS)
PLAIN, THEIRS, SAME, WORLD = "torch", "pymultiworld", "communicator", "world"
FORMS = (PLAIN, THEIRS, SAME, WORLD)
CAUGHT = "torch-caught"
"""torch.distributed by a thread for each sender, each with a handler of its own: over time only."""
WORDS = {
    PLAIN: "torch.distributed",
    THEIRS: "pymultiworld 0.2.3",
    SAME: "multiworld, pymultiworld's interface",
    WORLD: "multiworld, World",
}
TOPOLOGY_WORDS = {
    SINGLE: "single world: the leader and all senders",
    MULTI: "multi world: one leader, a world for each sender",
    PROCESS: "multi-process: a receiving process for each sender",
}


class Link(NamedTuple):
    """A sender's way to the process that receives from it, by ranks among all processes of one program."""

    world: str
    receiver: int
    sender: int


def size_of(senders: int) -> int:
    """How many processes a program has: receivers (the leader is the first), then senders."""
    return 2 * senders


def worlds_of(senders: int, *, processes: bool = True) -> dict[str, tuple[int, ...]]:
    """The worlds and their members, in the order in which every process joins its own.

    The leader is the receiving process of the first sender, so that the first pair stands in "multi" alone.

    Args:
        senders: how many.
        processes: with those of receiving processes beside the leader.
    """
    sending = range(senders, 2 * senders)
    found: dict[str, tuple[int, ...]] = {SINGLE: (LEADER, *sending)}
    found |= {f"{MULTI}-{number}": (LEADER, sender) for number, sender in enumerate(sending, 1)}
    if processes:
        found |= {
            f"{PROCESS}-{number}": (number - 1, sender)
            for number, sender in enumerate(sending, 1)
            if number > 1
        }
    return found


def links_of(topology: str, count: int, senders: int) -> list[Link]:
    """The ways of the first `count` senders.

    Args:
        topology: of `TOPOLOGIES`.
        count: how many send.
        senders: how many there are.

    Raises:
        ValueError: no such topology, or more senders than there are.
    """
    if topology not in TOPOLOGIES or not 0 < count <= senders:
        raise ValueError(
            f"{topology!r}, {count} of {senders} senders: one of {TOPOLOGIES}, and 1 to {senders}"
        )
    found = []
    for number in range(1, count + 1):
        sender = senders + number - 1
        if topology == SINGLE:
            found.append(Link(SINGLE, LEADER, sender))
        elif topology == MULTI or number == 1:
            found.append(Link(f"{MULTI}-{number}", LEADER, sender))
        else:
            found.append(Link(f"{PROCESS}-{number}", number - 1, sender))
    return found


def cells_of(count: int) -> list[tuple[str, str]]:
    """Form and topology of each rate with `count` senders.

    With one sender the receiving process is the leader, and multi-process the same as multi world.
    """
    topologies = TOPOLOGIES if count > 1 else (SINGLE, MULTI)
    return [(form, topology) for topology in topologies for form in FORMS]
