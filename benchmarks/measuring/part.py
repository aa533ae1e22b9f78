"""The interface of a part of the benchmarks, and the description of its run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.figures.figure import Figure

Value = TypeVar("Value")


class Unavailable(Exception):
    """A part cannot run here; the message says why. Its figures are missing, and nothing has failed."""


def _silent(_: str) -> None:
    """Progress that is not shown."""


@dataclass(frozen=True)
class Run:
    """What a part is told about its run.

    Attributes:
        full: the long form; otherwise the part has about a minute.
        options: the part's own, at their defaults unless it runs alone.
        alone: the part was started by its own name.
        progress: shows what is being done now, in a line.
        remark: says something that the record keeps beside the figures: what was left out, and why.
    """

    full: bool = False
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    alone: bool = False
    progress: Callable[[str], None] = _silent
    remark: Callable[[str], None] = _silent

    def pick(self, quick: Value, full: Value) -> Value:
        """The one for this form of the run."""
        return full if self.full else quick


@dataclass(frozen=True)
class Part:
    """A part; `benchmarks.NAME.part` has it as `PART`.

    Attributes:
        name: its folder in `benchmarks`, and the `part` of its figures.
        title: for tables and the page.
        description: what is measured and how, in a few sentences.
        measure: yields figures as they are there. May raise `Unavailable`.
        add_options: adds the part's own options to a parser; names of common ones are in `benchmarks.cli`.
        torch: the version that is measured, where that is not the one that the benchmarks run on.
    """

    name: str
    title: str
    description: str
    measure: Callable[[Run], Iterable[Figure]]
    add_options: Callable[[argparse.ArgumentParser], Any] | None = None
    torch: str = ""

    def defaults(self) -> argparse.Namespace:
        """Its own options, nothing given."""
        parser = argparse.ArgumentParser()
        if self.add_options is not None:
            self.add_options(parser)
        return parser.parse_args([])
