"""Notes: what the two ends of a state's transfer tell each other, beside the state itself.

One transfer, in order (the receiver left, the provider right):

| receiver | provider | with |
|---|---|---|
| HELLO | | number of the transfer, bytes and checksum of what follows: the tensors that it has; 1 |
| | BUSY | nothing: it compares these with its own; once in a while, where HELLO came with that 1 |
| | OFFER | bytes and checksum of the description, number of tensors, bytes of the tensors that will come |
| GO | | nothing; or GONE, if it does not wait any more: then its next HELLO counts |
| | | the description |
| | PART | the part's number; the part's pieces are on their way |
| TOOK | | the part's number; at most two parts are on their way |
| | SUMS | number of checksums, which follow, one for each piece |
| DONE | | nothing: all is well |

FAILED, with the reason, ends a transfer from either side. All notes have the same size.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from multiworld.errors import StateError

__all__ = ["SIZE", "VERSION", "Kind", "Note", "pack", "unpack"]

VERSION = 1
"""Of the transfer: of notes, of the description, and of how tensors are cut."""

SIZE = 512
"""Bytes of a note."""

_HEAD = struct.Struct("<4sHH4QH")  # magic, version, kind, numbers, bytes of the text
_MAGIC = b"m8ds"
_TEXT = SIZE - _HEAD.size


class Kind(enum.IntEnum):
    """What a note says."""

    HELLO = 1
    OFFER = 2
    GO = 3
    GONE = 4
    PART = 5
    TOOK = 6
    SUMS = 7
    DONE = 8
    FAILED = 9
    BUSY = 10


class Note(NamedTuple):
    """What was told.

    Attributes:
        kind: see the module.
        numbers: four of them, 0 to 2^64 - 1; what they mean is the kind's.
        text: a reason.
    """

    kind: Kind
    numbers: tuple[int, int, int, int]
    text: str


def pack(kind: Kind, *numbers: int, text: str = "") -> bytes:
    """Return a note of `SIZE` bytes; further numbers are 0, and a long text is cut."""
    said = text.encode(errors="replace")[:_TEXT]
    head = _HEAD.pack(_MAGIC, VERSION, kind, *(*numbers, 0, 0, 0, 0)[:4], len(said))
    return (head + said).ljust(SIZE, b"\0")


def unpack(data: bytes | bytearray) -> Note:
    """Return a note of `SIZE` bytes.

    Raises:
        StateError: it is none, or of another version.
    """
    magic, version, kind, a, b, c, d, size = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != VERSION or kind not in set(Kind) or size > _TEXT:
        raise StateError(
            f"a note {bytes(data[:8]).hex()} of the transfer of a state",
            rule=f"Both ends speak version {VERSION} of the transfer",
            next_step="Install the same version of multiworld on both hosts",
        )
    return Note(Kind(kind), (a, b, c, d), data[_HEAD.size : _HEAD.size + size].decode(errors="replace"))
