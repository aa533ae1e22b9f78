"""Figures on the terminal: a line each as measured, then missed goals and changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from benchmarks.figures.compare import Comparison, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from benchmarks.figures.compare import Change
    from benchmarks.figures.figure import Figure
    from benchmarks.figures.records import Record

UNITS = {"us": "µs", "ratio": ""}
COLUMNS = (("ours", 11), ("stock", 11), ("value", 12), ("spread", 30), ("goal", 7), ("", 6))
SHOWN = 12
"""How many changed figures are listed; the record has all."""


def number(value: float) -> str:
    """Three significant digits, whole numbers from 1000 on whole."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{float(f'{value:.3g}'):g}"


def measure(value: float | None, unit: str) -> str:
    """A value with its unit; "" for None."""
    return "" if value is None else f"{number(value)} {UNITS.get(unit, unit)}".rstrip()


def spread(figure: Figure) -> str:
    """From the first quartile to the third; the tail of a distribution behind it."""
    text = f"{number(figure.low)} to {number(figure.high)}" if figure.samples > 1 else ""
    tail = [f"{name} {number(value)}" for name, value in figure.tail.items()]
    return "; ".join([text, *tail] if text else tail)


def verdict(figure: Figure) -> str:
    """One word: met, missed, or none without a goal."""
    return {True: "met", False: "missed", None: ""}[figure.met]


class FigureTable:
    """The table of a part: the head at once, each figure when it is there."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # The rest of the line is for the names.
        self._names = max(30, console.width - sum(width + 2 for _, width in COLUMNS) - 2)

    def head(self, title: str) -> None:
        """The part's title and the names of the columns."""
        self._console.print()
        self._row(Text(title, style="bold"), *(Text(name, style="dim") for name, _ in COLUMNS))

    def show(self, figure: Figure) -> None:
        """A line."""
        met = figure.met
        self._row(
            Text(figure.name),
            Text(measure(figure.absolute, figure.absolute_unit)),
            Text(measure(figure.baseline, figure.absolute_unit)),
            Text(measure(figure.value, figure.unit), style="bold"),
            Text(spread(figure), style="dim"),
            Text("" if figure.goal is None else str(figure.goal)),
            Text(verdict(figure), style="" if met is None else "green" if met else "bold red"),
        )

    def say(self, text: str, style: str = "yellow") -> None:
        """A remark between the figures."""
        self._console.print(Text(f"  {text}", style=style))

    def _row(self, *cells: Text) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(width=self._names, overflow="fold")
        for _, width in COLUMNS:
            table.add_column(width=width, justify="right", overflow="fold")
        table.add_row(*cells)
        self._console.print(table)


def show_goals(console: Console, figures: Iterable[Figure]) -> None:
    """How many goals are met, and those that are not."""
    with_goal = [figure for figure in figures if figure.goal is not None]
    missed = [figure for figure in with_goal if not figure.met]
    console.print()
    if with_goal:
        style = "bold green" if not missed else "bold"
        console.print(Text(f"{len(with_goal) - len(missed)} of {len(with_goal)} goals met", style=style))
    for figure in missed:
        console.print(
            Text.assemble(
                ("  missed  ", "bold red"), figure.key,
                f"  {measure(figure.value, figure.unit)} ({spread(figure)}), goal {figure.goal}",
            )
        )  # fmt: skip


def show_comparison(console: Console, before: Record, after: Record, comparison: Comparison, of: str) -> None:
    """What two runs disagree on.

    Args:
        console: to print on.
        before: the older run.
        after: the newer one.
        comparison: of their figures.
        of: the parts compared, in words.
    """
    console.print()
    console.print(Text(f"{of}: since {before.when} ({before.commit or before.multiworld})", style="bold"))
    was, now = (
        {name: each.machine.get(name, "") for name in ("python", "torch", "kernel")}
        for each in (before, after)
    )
    for name in was:
        if was[name] != now[name]:
            console.print(f"  {name}: {was[name] or '-'}, now {now[name] or '-'}")
    if not comparison.changes:
        console.print(f"  {comparison.same} figures, none changed by more than their spreads")
    else:
        many = len(comparison.changes)
        console.print(f"  {many} figures changed by more than their spreads, {comparison.same} did not")
        console.print(_changes(comparison.changes[:SHOWN]))
        if many > SHOWN:
            console.print(f"  and {many - SHOWN} more")
    for what, keys in (("only then", comparison.gone), ("only now", comparison.new)):
        if keys:
            console.print(
                f"  {what}: {', '.join(keys[:6])}{f' and {len(keys) - 6} more' if len(keys) > 6 else ''}"
            )


def _changes(changes: Iterable[Change]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), header_style="dim")
    for name in ("figure", "then", "now", "factor", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right", overflow="fold")
    for change in changes:
        worse = change.verdict is Verdict.WORSE
        table.add_row(
            change.after.key,
            f"{measure(change.before.value, change.before.unit)} ({spread(change.before)})",
            f"{measure(change.after.value, change.after.unit)} ({spread(change.after)})",
            "" if change.factor is None else f"{change.factor:.2f}",
            Text(
                change.verdict.value + (", goal lost" if change.goal_lost else ""),
                style="red" if worse else "green",
            ),
        )
    return table
