"""Frames of the lane: the only thing that travels on a connection between two members.

A frame is a header of 32 bytes; EAGER and DATA are followed by `size` bytes of payload.

| kind | means | of the header it uses |
|---|---|---|
| EAGER | a whole message | channel, tag, size |
| ANNOUNCE | a message that stays with its sender until it is asked for | channel, tag, id, size, address |
| CLEAR | send the announced message | id |
| DATA | the next part of it | id, size |
| DONE | the announced message is not needed any more: it was read from memory, or refused | id |
| CREDIT | so many bytes were taken by receives | size |
| HELD | messages wait at their sender for credit (size 1), or none does any more (size 0) | size |
| WANT | a receive waits here: announce a held message, whatever the credit | channel, tag |
"""

from __future__ import annotations

import struct

__all__ = [
    "ANNOUNCE",
    "BUDGET",
    "CHANNEL_BITS",
    "CHUNK",
    "CLEAR",
    "CREDIT",
    "DATA",
    "DONE",
    "EAGER",
    "EAGER_LIMIT",
    "HEADER",
    "HELD",
    "OVERHEAD",
    "PIECE",
    "READ_FROM",
    "WANT",
    "ProtocolError",
    "cost",
    "pack",
]

EAGER, ANNOUNCE, CLEAR, DATA, DONE, CREDIT, HELD, WANT = range(1, 9)

HEADER = struct.Struct("<QIIQQ")
"""kind in the lowest byte and channel above it, tag, id, size, address: 32 bytes, little-endian."""

CHANNEL_BITS = 56
"""So many that channels can be made of digests of names."""

EAGER_LIMIT = 256 << 10
"""Bytes of a message that is sent before a receive is known for it. Larger ones are announced: that costs a
round trip, which the copy of so many bytes outweighs."""

READ_FROM = 64 << 10
"""Bytes from which on a message is announced that can be read from memory: as soon as that is no slower."""

BUDGET = 4 << 20
"""Bytes of messages without a receive that one member keeps for another. Far more than one message's cost, so
that a receiver's credits reach the sender before it has to stop."""

OVERHEAD = 512
"""Bytes that any message counts beside its payload: what Python's objects for it take."""

CHUNK = 1 << 20
"""Bytes of an announced message that are sent in one go; other messages may pass between two chunks.

A quarter of it made messages of 4 MB between hosts a fifth slower: each chunk is some calls of Python's."""


PIECE = 4 << 20
"""Bytes of a message that are read from memory in one go: less than a millisecond, 10 ms into fresh pages."""


class ProtocolError(ConnectionError):
    """The other end does not keep the lane's rules: its connection cannot be used any more."""


def pack(kind: int, *, channel: int = 0, tag: int = 0, id: int = 0, size: int = 0, address: int = 0) -> bytes:
    """Return a header."""
    return HEADER.pack(kind | channel << 8, tag, id, size, address)


def cost(size: int) -> int:
    """Return what an eager message of `size` bytes takes of the budget; an announced one takes `OVERHEAD`."""
    return size + OVERHEAD
