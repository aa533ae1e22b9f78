"""Choice of the server, of a list of addresses, that is the store: decided by epochs. Pure.

A store may be a list of addresses, of which one is served at a time. Every server has an epoch; a process
never goes back to an older one than it has known. A server that finds a newer one ends.

A process that is to serve binds first and looks at all other addresses then. So of two that do so at once at
least one sees the other, and the later in the list gives way. Only hosts that do not reach each other can
both have a server.

An epoch is a number that all numbers of its generations exceed, so that two servers never give one number to
two rosters: the count of servers so far, times `STRIDE`, and a random part. The count leaves, divided by the
number of addresses, the remainder of the server's position: those of two addresses differ. A first server has
epoch 0 wherever it is; two of these at once are told apart by `may_begin`: no world begins at one that does
not see more than half of the addresses.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NEVER",
    "STRIDE",
    "AddressState",
    "Found",
    "Verdict",
    "best",
    "may_begin",
    "next_epoch",
    "outdated",
    "outranked",
    "to_serve",
    "verdict",
]  # fmt: skip

NEVER = -1
"""The epoch that a process knows which has known no server."""

STRIDE = 1_000_000
"""Numbers between two counts of servers. At most half of them are the random part."""


class AddressState(enum.Enum):
    """What was found at an address."""

    OPEN = "open"
    CANDIDATE = "candidate"
    FREE = "free"
    SILENT = "silent"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Found:
    """What was found at an address.

    Attributes:
        look: OPEN: a server of the list. CANDIDATE: a store that is none yet. FREE: its host answers, and
            nothing listens. SILENT: no answer in time. FOREIGN: something else listens, perhaps an
            ordinary store.
        epoch: of an open server.
        mark: of an open server: no other has it.
        process: of an open server: id of the process that serves, as in rosters; "" where it is not known.
        slow: SILENT, and its host accepted the connection: the process may only be slow.
    """

    look: AddressState
    epoch: int = NEVER
    mark: str = ""
    process: str = ""
    slow: bool = False


class Verdict(enum.Enum):
    """What a candidate is to do: serve, give way to another, or look once more."""

    SERVE = "serve"
    YIELD = "yield"
    WAIT = "wait"


def best(found: Sequence[Found], known: int) -> int | None:
    """Return the position of the server to use; None without one.

    Args:
        found: at each address, in the list's order.
        known: the highest epoch that this process knows.
    """
    there = [
        (-each.epoch, position)
        for position, each in enumerate(found)
        if each.look is AddressState.OPEN and each.epoch >= known
    ]
    return min(there)[1] if there else None


def outdated(found: Sequence[Found], known: int) -> tuple[int, ...]:
    """Return the positions of servers that are to learn that a newer one has been."""
    return tuple(
        position
        for position, each in enumerate(found)
        if each.look is AddressState.OPEN and each.epoch < known
    )


def to_serve(found: Sequence[Found], own: Sequence[bool]) -> int | None:
    """Return the position at which this process is to serve; None where it is not.

    Args:
        found: at each address; none of them is to be used.
        own: whether the address is one of this host.
    """
    for position, each in enumerate(found):
        if each.look is AddressState.CANDIDATE:
            return None
        if own[position] and each.look is AddressState.FREE:
            return position
    return None


def verdict(position: int, found: Sequence[Found], known: int) -> Verdict:
    """Decide about a candidate that has bound its address.

    Args:
        position: its own.
        found: at each address, seen after it had bound.
        known: the highest epoch that its process knows.
    """
    others = [each if at != position else Found(AddressState.FREE) for at, each in enumerate(found)]
    if best(others, known) is not None:
        return Verdict.YIELD
    if any(each.look is AddressState.CANDIDATE for each in others[:position]):
        return Verdict.YIELD
    if any(each.look is AddressState.CANDIDATE for each in others[position:]):
        return Verdict.WAIT
    return Verdict.SERVE


def next_epoch(position: int, found: Sequence[Found], known: int, draw: int) -> int:
    """Return the epoch of a server that begins.

    Args:
        position: its own.
        found: as for `verdict`.
        known: as for `verdict`.
        draw: a random number.
    """
    last = max(known, *(each.epoch for each in found))
    if last == NEVER:
        return 0
    count = last // STRIDE + 1
    count += (position - count) % len(found)
    return count * STRIDE + draw % (STRIDE // 2)


def outranked(position: int, epoch: int, found: Sequence[Found]) -> bool:
    """Whether a server is to end because of another one; `found` as for `verdict`."""
    return any(
        each.look is AddressState.OPEN and (each.epoch, -at) > (epoch, -position)
        for at, each in enumerate(found)
        if at != position
    )


def may_begin(position: int, found: Sequence[Found]) -> bool:
    """Whether worlds of which nothing is known may begin at this server.

    It sees more than half of the addresses, itself among them; or half with the first one.
    """
    seen = [at == position or each.look is not AddressState.SILENT for at, each in enumerate(found)]
    return 2 * sum(seen) > len(seen) or (2 * sum(seen) == len(seen) and seen[0])
