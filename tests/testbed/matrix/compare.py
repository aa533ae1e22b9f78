"""Stock and patched beside each other in every mode that is not CleanUpOnly: they must end alike. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matrix.modes import OTHERS
from matrix.outcome import ALIVE, BLOCKED, CUT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matrix.cells import Target
    from matrix.outcome import Row, Seen

__all__ = ["Comparison", "Difference", "compare", "pairs"]


@dataclass(frozen=True)
class Difference:
    """A cell that did not end alike."""

    scenario: str
    mode: str
    stock: str
    patched: str


@dataclass(frozen=True)
class Comparison:
    """Two columns compared.

    Attributes:
        stock: name of the first.
        patched: name of the second.
        same: how many cells ended alike.
        differences: those that did not.
        lacking: cells that only one of them has, or that failed to run.
    """

    stock: str
    patched: str
    same: int
    differences: tuple[Difference, ...]
    lacking: tuple[str, ...]


def pairs(columns: Sequence[Target]) -> list[tuple[Target, Target]]:
    """Return each stock column with its patched twin: the same torch, the same backend."""
    return [
        (stock, patched)
        for stock in columns
        for patched in columns
        if not stock.patched
        and patched.patched
        and (stock.torch, stock.backend) == (patched.torch, patched.backend)
    ]


def compare(stock: Target, patched: Target, rows: Iterable[Row]) -> Comparison:
    """Compare two columns cell by cell in the modes that the patches leave alone.

    Compared are the end of the process, and of each step its outcome (returned, blocked, the exception's type) and
    its result. A process that dies may or may not get to its next step before it does, so steps after the fault
    that one of the two did not come to are no difference if both died of the same.

    With several runs of a cell, one of the stock build's outcomes must be one of the patched build's: what varies
    from run to run on both is no difference.
    """
    left, right = _by_cell(stock, rows), _by_cell(patched, rows)
    same, differences, lacking = 0, [], []
    for key in sorted(left.keys() | right.keys()):
        ours, theirs = left.get(key, []), right.get(key, [])
        if not ours or not theirs or any(row.failure for row in (*ours, *theirs)):
            lacking.append(f"{key[0]} ({key[1]})")
        elif any(_alike(a, b) for a in ours for b in theirs):
            same += 1
        else:
            differences.append(Difference(*key, _told(ours[0]), _told(theirs[0])))
    return Comparison(stock.name, patched.name, same, tuple(differences), tuple(lacking))


def _by_cell(target: Target, rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if (row.build, row.backend) == (target.build, target.backend) and row.mode in OTHERS:
            found.setdefault((row.scenario, row.mode), []).append(row)
    return found


def _alike(left: Row, right: Row) -> bool:
    return len(left.seen) == len(right.seen) and all(map(_same_fate, left.seen, right.seen))


def _same_fate(left: Seen, right: Seen) -> bool:
    if left.end != right.end:
        return False
    ours, theirs = _steps(left), _steps(right)
    names = ours.keys() & theirs.keys() if left.end != ALIVE else ours.keys() | theirs.keys()
    return all(ours.get(name) == theirs.get(name) for name in names)


def _steps(seen: Seen) -> dict[str, tuple[str, object]]:
    return {
        step.name: (step.outcome, None if step.name.endswith("worst") else step.result)
        for step in seen.steps
        if step.outcome != CUT
    }


def _told(row: Row) -> str:
    return "; ".join(
        f"rank {seen.rank} {seen.end}: "
        + ", ".join(f"{name} {outcome}" for name, (outcome, _) in _steps(seen).items() if outcome != BLOCKED)
        for seen in row.seen
    )
