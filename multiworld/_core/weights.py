"""Decisions about versions of weights: how they are laid out, which are kept, and which engines are served.

`multiworld.weights` acts by them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from multiworld._core.state_pieces import Piece, parts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = [
    "ALIGNED",
    "Entry",
    "Head",
    "Placed",
    "Roster",
    "encode",
    "laid_out",
    "layout",
    "message",
    "superseded",
]

ALIGNED = 16
"""Bytes: each piece begins in its bucket at a multiple of it, as every dtype needs."""


class Entry(NamedTuple):
    """A tensor of the weights.

    Attributes:
        name: the same on trainer and engines.
        dtype: as in "float32".
        shape: of the whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Placed(NamedTuple):
    """A piece of a tensor in a bucket.

    Attributes:
        piece: which.
        at: its first byte in the bucket.
    """

    piece: Piece
    at: int


def laid_out(part: Iterable[Piece]) -> tuple[list[Placed], int]:
    """Return where the pieces of a bucket lie, and the bucket's bytes."""
    placed, end = [], 0
    for piece in part:
        placed.append(Placed(piece, end))
        end += -(-piece.size // ALIGNED) * ALIGNED
    return placed, end


def layout(
    entries: Sequence[Entry], itemsizes: Mapping[str, int], most: int
) -> list[tuple[list[Placed], int]]:
    """Return all buckets, each as its pieces and its bytes; trainer and engine find the same.

    Where none of them has an element there is one bucket, with nothing in it.

    Args:
        entries: of the weights, in order.
        itemsizes: bytes of an element, by dtype.
        most: bytes of a bucket's tensors, at most.
    """
    numbered = ((number, each.shape, itemsizes[each.dtype]) for number, each in enumerate(entries))
    found = [laid_out(part) for part in parts(numbered, most)]
    return found if found or not entries else [([], 0)]


class Head(NamedTuple):
    """What an engine is told of a version before its buckets.

    Attributes:
        session: of the publisher; versions are compared within one.
        version: 0 or more.
        bucket: bytes of a bucket's tensors, at most.
        entries: the tensors.
        digests: of the buckets, in order.
    """

    session: str
    version: int
    bucket: int
    entries: tuple[Entry, ...]
    digests: tuple[str, ...]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Head:
        """Read a message.

        Raises:
            ValueError: it is no head of a version.
        """
        try:
            entries = tuple(
                Entry(str(name), str(dtype), tuple(int(each) for each in shape))
                for name, dtype, shape in told["tensors"]
            )
            digests = tuple(str(each) for each in told["digests"])
            found = cls(str(told["session"]), int(told["version"]), int(told["bucket"]), entries, digests)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(told)[:80]!r} is no version of weights") from error
        if found.version < 0 or found.bucket < 1 or any(each < 0 for e in entries for each in e.shape):
            raise ValueError(f"version {found.version}, buckets of {found.bucket} bytes: a size is negative")
        return found

    def told(self) -> dict[str, Any]:
        """Return it as a message."""
        return {
            "kind": "version",
            "session": self.session,
            "version": self.version,
            "bucket": self.bucket,
            "tensors": self.entries,
            "digests": self.digests,
        }


def encode(told: Mapping[str, Any]) -> bytes:
    """Return a message as bytes."""
    return json.dumps(told, separators=(",", ":")).encode()


def message(data: bytes) -> dict[str, Any]:
    """Return what `encode` was given.

    Raises:
        ValueError: the bytes are no message.
    """
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"{str(found)[:80]!r} is no message")  # noqa: TRY004  (as of JSON that does not parse)
    return found


def superseded(newest: int, sent: Collection[int], waiting: Collection[int], most: int) -> list[int]:
    """Return the versions whose transfers are cut, so that at most `most` versions are in memory.

    The oldest transfers go on: an engine that is slower than the trainer gets whole versions, though not
    each. A version of which no byte is under way costs no engine anything: it is cut before all of those.

    Args:
        newest: the version that was published last.
        sent: versions that an engine is getting.
        waiting: versions that engines were told of and have not asked for, as they load another one; one that
            is in `sent`, too, counts as sent.
        most: 2 or more.
    """
    older = [*sorted({*sent} - {newest}), *sorted({*waiting} - {newest, *sent})]
    return older[max(1, most - 1) :]


class Roster:
    """Which engines have a thread that serves them.

    Attributes:
        serving: names of the engines that are served, or about to be.
    """

    def __init__(self) -> None:
        self.serving: set[str] = set()
        self._again: set[str] = set()

    def announced(self, seats: Collection[str]) -> list[str]:
        """Return the engines of those that announced themselves that are to be served from now on.

        One that is still served has died and been started again: it is served again when that has ended.
        """
        fresh = sorted(set(seats) - self.serving)
        self._again |= set(seats) & self.serving
        self.serving |= set(fresh)
        return fresh

    def ended(self, seat: str) -> bool:
        """An engine is not served any more; return whether it is to be served again, at once."""
        if seat in self._again:
            self._again.discard(seat)
            return True
        self.serving.discard(seat)
        return False
