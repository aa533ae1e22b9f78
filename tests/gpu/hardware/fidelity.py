"""Hardware beside the test bed: does a cell end alike? Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from matrix.words import together, words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matrix.cells import Target
    from matrix.outcome import Row
    from matrix.results import Results

__all__ = ["Alike", "Answer", "as_on_the_bed", "bed_rows"]


class Alike(str, Enum):
    """What the page's column says."""

    YES = "yes"
    PARTLY = "partly"
    NO = "**no**"
    UNKNOWN = "-"

    __str__ = str.__str__


@dataclass(frozen=True)
class Answer:
    """How a cell compares.

    Attributes:
        alike: the word; PARTLY: some of its runs ended as on the bed.
        bed: what the bed said, "" where it was not run there.
    """

    alike: Alike
    bed: str = ""


def bed_rows(bed: Results, target: Target) -> dict[tuple[str, str], list[Row]]:
    """Return the bed's rows for the same torch, patched or not, and the same backend, by scenario and mode.

    Builds have names of somebody's choice, so that these are not compared.
    """
    same = {
        (each.build, each.backend)
        for each in bed.targets
        if (each.torch, each.patched, each.backend) == (target.torch, target.patched, target.backend)
    }
    found: dict[tuple[str, str], list[Row]] = {}
    for row in bed.rows:
        if (row.build, row.backend) in same and not row.failure:
            found.setdefault((row.scenario, row.mode), []).append(row)
    return found


def as_on_the_bed(mine: Iterable[Row], bed: Sequence[Row]) -> Answer:
    """Compare a cell's runs: the process's end, and what every step returned or raised; not the times."""
    ours = {words(row).text for row in mine if not row.failure}
    told = [words(row) for row in bed]
    theirs = {said.text for said in told}
    if not ours or not theirs:
        return Answer(Alike.UNKNOWN)
    alike = Alike.YES if ours <= theirs else Alike.PARTLY if ours & theirs else Alike.NO
    return Answer(alike, together(told))
