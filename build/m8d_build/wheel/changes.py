"""Changes to a wheel: an entry replaced or added, or some bytes of one overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from m8d_build.wheel.wheelfile import WheelFile

__all__ = ["BLOCK", "Edit", "Put", "content", "edit_blocks"]

BLOCK = 4 << 20


@dataclass(frozen=True)
class Put:
    """An entry replaced, or added.

    Attributes:
        name: in the wheel ("torch/lib/nccl.so.2").
        source: the bytes, or the file that has them.
        executable: mode of an added entry; a replaced one keeps its own.
    """

    name: str
    source: bytes | Path
    executable: bool = False


@dataclass(frozen=True)
class Edit:
    """An entry of the source wheel with some of its bytes overwritten; its size stays.

    Attributes:
        name: in the wheel.
        edits: (offset in the unpacked entry, new bytes); they must not overlap.
    """

    name: str
    edits: tuple[tuple[int, bytes], ...]


def edit_blocks(blocks: Iterable[bytes], edits: Sequence[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield the blocks with the edits written over them; an edit may span blocks.

    Raises:
        ValueError: edits overlap, or one lies outside the bytes.
    """
    left = sorted(edits, reverse=True)
    for (after, _), (offset, data) in pairwise(left):
        if offset + len(data) > after:
            raise ValueError(f"the edits at {offset} and {after} overlap")
    if left and left[-1][0] < 0:
        raise ValueError(f"the edit at {left[-1][0]} is outside")
    start = 0
    for block in blocks:
        end = start + len(block)
        changed: bytearray | None = None
        while left and left[-1][0] < end:
            offset, data = left.pop()
            fits = data[: end - offset]
            changed = bytearray(block) if changed is None else changed
            changed[offset - start : offset - start + len(fits)] = fits
            if len(fits) < len(data):
                left.append((end, data[len(fits) :]))
        yield block if changed is None else bytes(changed)
        start = end
    if left:
        raise ValueError(f"the edit at {left[-1][0]} is outside: there are {start} bytes")


def content(wheel: WheelFile, change: Put | Edit) -> tuple[int, Iterable[bytes]]:
    """Return an entry's new size and its bytes, which are read as they are taken.

    Raises:
        WheelInvalid: the entry to edit is damaged.
        OSError: the file to put in cannot be read.
    """
    if isinstance(change, Edit):
        size = wheel.entries[change.name].file_size
        return size, edit_blocks(wheel.blocks(change.name, BLOCK), change.edits)
    if isinstance(change.source, bytes):
        return len(change.source), [change.source]
    return change.source.stat().st_size, _file_blocks(change.source)


def _file_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
