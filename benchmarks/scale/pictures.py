"""Pictures of `docs/scale.md`, drawn as those of the page of speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl

from benchmarks.page import drawing
from benchmarks.page.drawing import COLOURS, GOAL, SHAPES, STOCK, STYLE
from benchmarks.scale.record import by_rule

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    from benchmarks.scale.record import Row, Tables

TITLES = {
    "watching": "What one process does to watch its world",
    "verdicts": "From a fault until every member has the verdict",
    "reforming": "From a breakage until the next generation is active",
    "losses": "Between two false verdicts of a world, where packets are lost",
}
_TIMEOUT = 30.0


def draw_all(tables: Tables, folder: Path) -> None:
    """Write every picture."""
    for name, words in TITLES.items():
        with mpl.rc_context(STYLE):
            canvas = DRAWN[name](tables)
            drawing.title(canvas, words)
        drawing.save(canvas, folder / f"{name}.svg")


def _line(axes: Axes, rows: Sequence[Row], what: str, label: str, style: int, scale: float = 1.0) -> None:
    there = [row for row in rows if row.get(what)]
    axes.plot(
        [row["members"] for row in there], [scale * row[what] for row in there],
        color=COLOURS[style], marker=SHAPES[style], label=label,
    )  # fmt: skip


def _sizes(axes: Axes, legend: Literal["best", "lower right"] = "best") -> None:
    axes.set_xscale("log")
    axes.set_xticks([4, 16, 64, 256, 1000, 10_000], ["4", "16", "64", "256", "1k", "10k"])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("members")
    axes.legend(loc=legend)


def _watching(tables: Tables) -> Canvas:
    canvas, (load, said) = drawing.panels(2.4, 2.2)
    rows = tables["watching"]
    _line(load, rows, "cpu", "all of it", 0, 100)
    _line(load, rows, "scan", "of it: looking at every peer", 1, 100)
    load.set_title("CPU of the watchdog's thread")
    load.set_ylabel("% of a core")
    _line(said, rows, "sent", "of one process", 2)
    _line(said, rows, "all", "of all", 3)
    said.set_title("signs of life")
    said.set_ylabel("a second")
    for axes in (load, said):
        drawing.log_values(axes)
        _sizes(axes)
    return canvas


def _verdicts(tables: Tables) -> Canvas:
    canvas, (axes,) = drawing.panels(2.6)
    for style, (what, label) in enumerate({
        "crash": "killed", "settled": "killed: all is said", "stop": "stopped", "host": "host cut off",
        "join": "(to connect all)",
    }.items()):  # fmt: skip
        _line(axes, tables["watching"], what, label, style)
    drawing.log_values(axes)
    axes.set_ylabel("s")
    _sizes(axes)
    return canvas


def _reforming(tables: Tables) -> Canvas:
    canvas, (axes,) = drawing.panels(2.8)
    _line(axes, tables["reforming"], "active", "with letters", 0)
    _line(axes, tables["alone"], "active", "each writes for itself", 2)
    _line(axes, tables["real"], "active", "real, all on two busy cores", 1)
    _line(axes, tables["real"], "active_sim", "simulated, all on two cores", 4)
    axes.axhline(_TIMEOUT, color=GOAL, lw=1, ls="--")
    axes.annotate("timeout of a join", (4, 1.15 * _TIMEOUT), color=GOAL, fontsize=7.5)
    drawing.log_values(axes)
    axes.set_ylabel("s")
    axes.set_ylim(bottom=1e-4)
    _sizes(axes, "lower right")
    return canvas


def _losses(_tables: Tables) -> Canvas:
    canvas, (axes,) = drawing.panels(2.4)
    sizes = [4, 16, 64, 256, 1000, 10_000]
    for style, loss in enumerate((0.001, 0.01, 0.05)):
        hours = [1 / (size * (size - 1) * by_rule(loss)) / 3600 for size in sizes]
        axes.plot(sizes, hours, color=COLOURS[style], marker=SHAPES[style], label=f"{100 * loss:g} % lost")
    axes.axhline(24 * 30, color=STOCK, lw=1, ls="--")
    axes.annotate("a month", (4, 24 * 36), color=STOCK, fontsize=7.5)
    drawing.log_values(axes)
    axes.set_ylabel("hours")
    _sizes(axes)
    return canvas


DRAWN: dict[str, Any] = {
    "watching": _watching, "verdicts": _verdicts, "reforming": _reforming, "losses": _losses,
}  # fmt: skip
