"""Pieces of a state: how its tensors are cut, and which pieces travel together.

Both ends decide that by the shapes alone, and so alike. A piece is one message, of bytes in row-major order.
The pieces of a part travel together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["CHUNK", "TOGETHER", "Index", "Piece", "cuts", "parts", "pieces"]

CHUNK = 64 << 20
"""Bytes of a part, at most."""

TOGETHER = 256
"""Pieces of a part, at most."""

Index = tuple[int | slice, ...]
"""Of a tensor: what it picks is contiguous where the tensor is."""


class Piece(NamedTuple):
    """A piece of a tensor.

    Attributes:
        tensor: its number.
        at: where in it.
        size: bytes.
    """

    tensor: int
    at: Index
    size: int


def cuts(shape: Sequence[int], itemsize: int, most: int) -> Iterator[Index]:
    """Yield the pieces of a tensor, in order, of at most `most` bytes each; none of an empty one.

    Args:
        shape: of the tensor.
        itemsize: bytes of an element.
        most: at least `itemsize`.
    """
    size = itemsize * math.prod(shape)
    if not size:
        return
    if size <= most:
        yield ()
        return
    rows = shape[0]
    row = size // rows
    if row <= most:
        step = most // row
        for at in range(0, rows, step):
            yield (slice(at, min(at + step, rows)),)
        return
    for at in range(rows):
        for rest in cuts(shape[1:], itemsize, most):
            yield (at, *rest)


def parts(tensors: Iterable[tuple[int, Sequence[int], int]], most: int) -> Iterator[list[Piece]]:
    """Yield the parts of tensors, given as number, shape and itemsize, in order.

    Args:
        tensors: number, shape, and bytes of an element.
        most: bytes of a part.
    """
    part: list[Piece] = []
    for begins, piece in pieces(tensors, most):
        if begins and part:
            yield part
            part = []
        part.append(piece)
    if part:
        yield part


def pieces(tensors: Iterable[tuple[int, Sequence[int], int]], most: int) -> Iterator[tuple[bool, Piece]]:
    """Yield the pieces of `parts` one by one, each with whether a part begins with it.

    A tensor is asked for when all pieces of the one before have been taken.
    """
    count = full = 0
    for number, shape, itemsize in tensors:
        for index in cuts(shape, itemsize, most):
            size = _size(shape, itemsize, index)
            if not count or full + size > most or count == TOGETHER:
                count = full = 0
            yield not count, Piece(number, index, size)
            count += 1
            full += size


def _size(shape: Sequence[int], itemsize: int, index: Index) -> int:
    size = itemsize * math.prod(shape[len(index) :])
    for each in index:
        if isinstance(each, slice):
            size *= int(each.stop - each.start)
    return size
