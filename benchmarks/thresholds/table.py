"""The table of thresholds: lane/gloo by operation, size and members. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from benchmarks.figures.sizes import size_name

if TYPE_CHECKING:
    from collections.abc import Mapping

Key = tuple[str, int, int]
"""Operation, bytes, members."""


def table_of(ratios: Mapping[Key, float]) -> str:
    """A row for each operation, columns for members and sizes; "*" behind what is faster over gloo."""
    counts = sorted({members for _, _, members in ratios})
    sizes = sorted({size for _, size, _ in ratios})
    ops = [*dict.fromkeys(op for op, _, _ in ratios)]
    columns = [(members, size) for members in counts for size in sizes]
    width = max((len(op) for op in ops), default=0)
    head = "".join(f"{f'{members}:{size_name(size)}':>9}" for members, size in columns)
    lines = [f"lane/gloo, MEMBERS:SIZE (* gloo is faster)\n{'':{width}}{head}"]
    for op in ops:
        cells = [_cell(ratios.get((op, size, members))) for members, size in columns]
        lines.append(f"{op:{width}}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def thresholds_of(ratios: Mapping[Key, float]) -> dict[tuple[str, int], int | None]:
    """By operation and members the size up to which the lane is to be used; None: at none.

    It is the one that makes all sizes together fastest, each counted by its factor: a single ratio that is
    off does not decide.
    """
    found: dict[tuple[str, int], int | None] = {}
    for op, members in dict.fromkeys((op, members) for op, _, members in ratios):
        found[op, members] = None
        best = total = 0.0
        for size in sorted(size for name, size, count in ratios if (name, count) == (op, members)):
            total += math.log(ratios[op, size, members])
            if total <= best:
                best, found[op, members] = total, size
    return found


def words_of(ratios: Mapping[Key, float]) -> str:
    """`thresholds_of` in lines."""
    lines = []
    for (op, members), size in thresholds_of(ratios).items():
        until = "at no size" if size is None else f"up to {size_name(size)}"
        lines.append(f"{op}, {members} members: the lane {until}")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}{'*' if value > 1 else ' '}"
