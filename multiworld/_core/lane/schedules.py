"""Schedules of collectives: their messages, in order; one generator for each kind, without I/O.

A generator posts sends, which never blocks, and yields what it waits for: a `Want`, to be received, or a send
that it has posted. Who drives it (a thread, an event loop) satisfies that, and goes on. Buffers are whatever
the `Line` takes; a list of buffers has one for each rank.

All members of a group post the same collectives in the same order, and each has a tag of its own. Between two
members the messages of one collective are received in the order in which they were sent.

Results have the same bits on every member: each element is reduced by one member, in one order; or by two,
with the operands in the same order; or, in a tree, by several, each of which hands its result on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from multiworld._core.lane.operations import Send

__all__ = [
    "STAR", "Line", "Want", "all_gather", "all_reduce_cut", "all_reduce_whole", "all_to_all", "barrier",
    "broadcast", "gather", "reduce", "reduce_scatter", "scatter",
]  # fmt: skip

B = TypeVar("B")

STAR = 32
"""Members up to which one exchanges small messages with all others; more do so in a tree (`_tree`).

Among 32 on two cores a star was faster (docs/collectives.md). The messages are as many, but pass one member.
"""


class Want(Generic[B]):
    """A message that is to be received.

    Attributes:
        peer: rank of the sender.
        buffer: gets the message, which has its size.
    """

    __slots__ = ("buffer", "peer")

    def __init__(self, peer: int, buffer: B) -> None:
        self.peer = peer
        self.buffer = buffer


if TYPE_CHECKING:
    Steps = Generator[Want[B] | Send, None, None]


class Line(Protocol[B]):
    """What a collective asks of its member.

    Attributes:
        rank: of the member, in the group.
        size: members of the group.
    """

    rank: int
    size: int

    def send(self, peer: int, buffer: B, /) -> Send:
        """Post a message; returns what is over when `buffer` may be changed."""

    def reduce(self, first: B, second: B, into: B, /) -> None:
        """Put the reduction of two buffers into a third, which may be one of them; all of one size."""

    def number(self, value: int, /) -> B:
        """Return a buffer that holds a number, of a size that hardly any other buffer has."""

    def compare(self, peer: int, buffer: B, value: int, /) -> None:
        """Raise if the number that a peer sent is another one than this member's."""

    def scratch(self, like: B, /) -> B:
        """Return a buffer of the same size whose content is of no interest."""


def _others(line: Line[B]) -> Iterator[int]:
    """Return the other members, beginning behind this one: so not all turn to one at a time."""
    return ((line.rank + step) % line.size for step in range(1, line.size))


def _rooted(line: Line[B], root: int) -> list[int]:
    return [peer for peer in range(line.size) if peer != root]


def _tree(line: Line[B], root: int, deep: bool) -> tuple[int | None, list[int]]:
    """Return from whom a member has the root's messages, and to whom it gives them on.

    Up to `STAR` members all have them from the root, and of more where it is not to be `deep`; else they form
    a binomial tree, of the depth log2(size).
    """
    place = (line.rank - root) % line.size
    if not deep or line.size <= STAR:
        if place:
            return root, []
        return None, [(root + each) % line.size for each in range(1, line.size)]
    step, children = 1, list[int]()
    while step < line.size and not place & step:
        if place + step < line.size:
            children.append((root + place + step) % line.size)
        step *= 2
    return None if place == 0 else (root + place - step) % line.size, children


def barrier(line: Line[B], nothing: B, *, deep: bool = True) -> Steps[B]:
    """Pass when all members have come here.

    Args:
        line: of the member.
        nothing: a buffer without bytes.
        deep: whether many members form a tree.
    """
    if line.size == 2:
        peer = 1 - line.rank
        sent = line.send(peer, nothing)
        yield Want(peer, nothing)
        yield sent
        return
    parent, children = _tree(line, 0, deep)
    for peer in children:
        yield Want(peer, nothing)
    if parent is not None:
        sent = line.send(parent, nothing)
        yield Want(parent, nothing)
        yield sent
    yield from [line.send(peer, nothing) for peer in reversed(children)]


def broadcast(line: Line[B], buffer: B, root: int, *, deep: bool = False) -> Steps[B]:
    """Give all members the root's buffer; `deep`: of many, members give it on, once they have all of it."""
    parent, children = _tree(line, root, deep)
    if parent is not None:
        yield Want(parent, buffer)
    yield from [line.send(peer, buffer) for peer in reversed(children)]


def gather(line: Line[B], buffer: B, into: Sequence[B], root: int) -> Steps[B]:
    """Give the root all members' buffers; `into` is of interest there only, but for its own place."""
    if line.rank == root:
        for peer in _rooted(line, root):
            yield Want(peer, into[peer])
    else:
        yield line.send(root, buffer)


def scatter(line: Line[B], buffer: B, out_of: Sequence[B], root: int) -> Steps[B]:
    """Give each other member its buffer of the root's `out_of`, which is of interest there only."""
    if line.rank == root:
        yield from [line.send(peer, out_of[peer]) for peer in _rooted(line, root)]
    else:
        yield Want(root, buffer)


def all_gather(line: Line[B], buffer: B, into: Sequence[B]) -> Steps[B]:
    """Give all members all buffers; each member's own place of `into` stays as it is."""
    sends = [line.send(peer, buffer) for peer in _others(line)]
    for peer in _others(line):
        yield Want(peer, into[peer])
    yield from sends


def all_to_all(line: Line[B], out_of: Sequence[B], into: Sequence[B]) -> Steps[B]:
    """Give each other member its buffer of everyone's `out_of`; each member's own places stay as they are."""
    sends = [line.send(peer, out_of[peer]) for peer in _others(line)]
    for peer in _others(line):
        yield Want(peer, into[peer])
    yield from sends


def reduce(line: Line[B], pieces: Sequence[B], root: int, total: int) -> Steps[B]:
    """Reduce everyone's buffer into the root's.

    Args:
        line: of the member.
        pieces: of the buffer, cut alike on all members.
        root: rank.
        total: bytes of the buffer.
    """
    several = len(pieces) > 1
    if line.rank == root:
        if several:
            yield from _compared(line, total)
        for piece in pieces:
            yield from _taken(line, piece, _others(line))
    else:
        sends = [line.send(root, line.number(total))] if several else []
        yield from [*sends, *(line.send(root, piece) for piece in pieces)]


def all_reduce_whole(line: Line[B], buffer: B, *, deep: bool = True) -> Steps[B]:
    """Reduce everyone's small buffer in place: two exchange it, of more the first one reduces last.

    Args:
        line: of the member.
        buffer: of one size on all members.
        deep: whether many members form a tree.
    """
    if line.size == 2:
        peer = 1 - line.rank
        other = line.scratch(buffer)
        sent = line.send(peer, buffer)
        yield Want(peer, other)
        yield sent  # before the buffer is changed
        if line.rank == 0:
            line.reduce(buffer, other, buffer)
        else:
            line.reduce(other, buffer, buffer)
        return
    parent, children = _tree(line, 0, deep)
    if children:
        yield from _taken(line, buffer, children)
    if parent is not None:
        sent = line.send(parent, buffer)
        yield Want(parent, buffer)  # which comes after the other has all of this one
        yield sent
    yield from [line.send(peer, buffer) for peer in reversed(children)]


def all_reduce_cut(line: Line[B], parts: Sequence[Sequence[B]], total: int) -> Steps[B]:
    """Reduce everyone's buffer in place: each member reduces a part of it, and gives that to the others.

    Args:
        line: of the member.
        parts: of the buffer, one for each member, each in pieces, cut alike on all members.
        total: bytes of the buffer.
    """
    # Always: a part may have the size of another member's whole buffer.
    sends = [line.send(peer, line.number(total)) for peer in _others(line)]
    sends += [line.send(peer, piece) for peer in _others(line) for piece in parts[peer]]
    yield from _compared(line, total)
    for piece in parts[line.rank]:
        yield from _taken(line, piece, _others(line))
        # Its member has sent its own part by then, and waits for this one.
        sends += [line.send(peer, piece) for peer in _others(line)]
    for peer in _others(line):
        for piece in parts[peer]:
            yield Want(peer, piece)  # which comes after that member has all of this one's
    yield from sends


def reduce_scatter(line: Line[B], parts: Sequence[Sequence[B]], into: Sequence[B], total: int) -> Steps[B]:
    """Give each member its part of the reduction of all members' buffers.

    Args:
        line: of the member.
        parts: of its buffer, one for each member, each in pieces; its own part is not read.
        into: the pieces of the result, which hold its own part at the beginning.
        total: bytes of each part.
    """
    several = len(into) > 1
    sends = [line.send(peer, line.number(total)) for peer in _others(line)] if several else []
    sends += [line.send(peer, piece) for peer in _others(line) for piece in parts[peer]]
    if several:
        yield from _compared(line, total)
    for piece in into:
        yield from _taken(line, piece, _others(line))
    yield from sends


def _taken(line: Line[B], buffer: B, peers: Iterable[int]) -> Steps[B]:
    """Reduce what the peers send into a buffer, in their order."""
    other = line.scratch(buffer)
    for peer in peers:
        yield Want(peer, other)
        line.reduce(buffer, other, buffer)


def _compared(line: Line[B], total: int) -> Steps[B]:
    """Compare sizes before anything else: of several pieces, those of one size would hide another size.

    Where a member sends no number, its first message has another size than numbers have.
    """
    for peer in _others(line):
        theirs = line.number(0)
        yield Want(peer, theirs)
        line.compare(peer, theirs, total)
