"""Comparison of two runs: figures that differ by more than their spreads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from benchmarks.figures.figure import FEW, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.figures.figure import Figure

GROWING = frozenset({"GB/s", "1/s", "MB/s", "index"})
"""Units of which more is better (of a ratio: those of its two sides), where a goal does not say."""


class Verdict(Enum):
    """What has become of a figure."""

    BETTER = "better"
    WORSE = "worse"


@dataclass(frozen=True)
class Change:
    """A figure that two runs disagree on.

    Attributes:
        before: of the older run.
        after: of the newer one.
        verdict: which way.
    """

    before: Figure
    after: Figure
    verdict: Verdict

    @property
    def factor(self) -> float | None:
        """After/before; None if it was 0 before."""
        return self.after.value / self.before.value if self.before.value else None

    @property
    def goal_lost(self) -> bool:
        """The goal was met before and is not any more."""
        return self.before.met is True and self.after.met is False


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other.

    Attributes:
        same: how many figures agree.
        changes: those that do not, the largest first.
        gone: keys that only the older run has.
        new: keys that only the newer one has.
    """

    same: int
    changes: tuple[Change, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]


def spread(figure: Figure) -> tuple[float, float]:
    """From where to where the value may lie."""
    if figure.samples < FEW:
        margin = UNKNOWN * abs(figure.value)
        return figure.value - margin, figure.value + margin
    return figure.low, figure.high


def growing(figure: Figure) -> bool:
    """Whether more is better."""
    if figure.goal is not None:
        return figure.goal.at_least is not None
    return (figure.absolute_unit if figure.unit == "ratio" else figure.unit) in GROWING


def change(before: Figure, after: Figure) -> Change | None:
    """The change of a figure; None if the spreads touch, or the unit is another."""
    (low, high), (new_low, new_high) = spread(before), spread(after)
    if before.unit != after.unit or (new_low <= high and low <= new_high):
        return None
    up = after.value > before.value
    return Change(before, after, Verdict.BETTER if up is growing(after) else Verdict.WORSE)


def compare(before: Iterable[Figure], after: Iterable[Figure]) -> Comparison:
    """Compare two runs, figure by figure."""
    old = {figure.key: figure for figure in before}
    new = {figure.key: figure for figure in after}
    both = [key for key in new if key in old]
    changes = [found for key in both if (found := change(old[key], new[key])) is not None]
    changes.sort(key=_size, reverse=True)
    return Comparison(
        same=len(both) - len(changes),
        changes=tuple(changes),
        gone=tuple(key for key in old if key not in new),
        new=tuple(key for key in new if key not in old),
    )


def _size(found: Change) -> float:
    """By what factor, in either direction; from or to 0 is the largest."""
    factor = found.factor
    if factor is None or factor <= 0:
        return float("inf")
    return max(factor, 1 / factor)
