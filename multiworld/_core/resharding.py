"""Resharding plan: which member gives which part of which tensor to whom, so that all have their shards.

A shard is a box of its tensor: where it begins and how long it is in each dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Box", "ShardPart", "overlap", "plan", "without"]


class Box(NamedTuple):
    """A part of a tensor, by dimension.

    Attributes:
        start: index of its first element.
        size: elements; a box with a 0 is empty.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]


class ShardPart(NamedTuple):
    """What one member gives to another, or takes from what it has itself.

    Attributes:
        name: of the tensor.
        source: rank of the member that has it.
        target: rank of the member that wants it.
        box: where in the whole tensor.
    """

    name: str
    source: int
    target: int
    box: Box


def overlap(one: Box, other: Box) -> Box:
    """Return what two boxes of a tensor have in common."""
    start = tuple(map(max, one.start, other.start))
    ends = map(min, _ends(one), _ends(other))
    return Box(start, tuple(max(0, end - begin) for begin, end in zip(start, ends, strict=True)))


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(begin + length for begin, length in zip(*box, strict=True))


def without(whole: Box, part: Box) -> list[Box]:
    """Return what is left of a box without `part`, a box inside of it: boxes that are not empty."""
    left, (start, size) = [], (list(whole.start), list(whole.size))
    for at, (begin, length) in enumerate(zip(*part, strict=True)):
        end, whole_end = begin + length, start[at] + size[at]
        for first, last in ((start[at], begin), (end, whole_end)):
            rest = Box((*start[:at], first, *start[at + 1 :]), (*size[:at], last - first, *size[at + 1 :]))
            if all(rest.size):
                left.append(rest)
        start[at], size[at] = begin, length
    return left


def plan(
    have: Sequence[Mapping[str, Box]], want: Sequence[Mapping[str, Box]]
) -> tuple[list[ShardPart], list[str]]:
    """Return what is given by whom to whom, tensor by tensor, and the tensors of which no member has all.

    A member takes what it has itself; otherwise members give in turns, beginning with the one after it.

    Args:
        have: by rank, of each tensor that it has, which box.
        want: by rank, the same.
    """
    pieces, missing = [], set()
    for name in sorted({name for each in want for name in each}):
        for target, wanted in enumerate(want):
            left = [wanted[name]] if name in wanted and all(wanted[name].size) else []
            for source in ((target + each) % len(have) for each in range(len(have))):
                if not left:
                    break
                if name not in have[source]:
                    continue
                rest = []
                for box in left:
                    found = overlap(box, have[source][name])
                    if all(found.size):
                        pieces.append(ShardPart(name, source, target, found))
                        rest += without(box, found)
                    else:
                        rest.append(box)
                left = rest
            if left:
                missing.add(name)
    return pieces, sorted(missing)
