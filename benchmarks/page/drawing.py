"""Drawing of SVG pictures: deterministic bytes, readable on light and dark pages."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.figures.table import UNITS, number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from benchmarks.figures.figure import Figure

# Okabe and Ito's colours, told apart with any kind of colour vision; shapes say the same again.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")
STOCK = "#5A5A5A"
GOAL = "#B2182B"
STYLE: Any = {  # matplotlib types the keys one by one
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "svg.hashsalt": "multiworld",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    # A light card of its own, so that a dark page does not swallow the dark text.
    "figure.facecolor": "#FCFCFC",
    "savefig.facecolor": "#FCFCFC",
    "axes.facecolor": "#FCFCFC",
    "axes.edgecolor": "#8A8A8A",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.0,
}
WIDTH = 3.55
"""Inches of every picture, 341 pixels: a phone shows one in full size, a wide page two side by side."""


def panels(*heights: float) -> tuple[Canvas, list[Axes]]:
    """A canvas with a panel for each height, in inches, one below the other."""
    canvas = Canvas(figsize=(WIDTH, sum(heights)), layout="constrained")
    grid = canvas.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    return canvas, [*grid.flat]


def title(canvas: Canvas, words: str) -> None:
    """Write above all panels what the picture shows."""
    lines = textwrap.fill(words, 46)
    canvas.suptitle(lines, x=0.02, ha="left", fontsize=9.5, fontweight="bold")


def save(canvas: Canvas, path: Path) -> Path:
    """Write it as SVG, without time or version in it."""
    with mpl.rc_context(STYLE):
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # Trailing blanks and the missing end of the last line are matplotlib's.
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def draw(make: Callable[[], Canvas | None], words: str, path: Path) -> bool:
    """Write what `make` draws, in this style and under a title; False if its figures are missing."""
    with mpl.rc_context(STYLE):
        canvas = make()
        if canvas is not None:
            title(canvas, words)
    if canvas is None:
        return False
    save(canvas, path)
    return True


def bytes_axis(axes: Axes, sizes: Iterable[float]) -> None:
    """A logarithmic axis of message sizes, labelled 4 B, 1 KB, 64 MB."""
    ticks = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    apart = (ticks[-1] / ticks[0]) ** (1 / 7)  # at least: labels must not touch each other
    few: list[float] = []
    for tick in reversed(ticks):
        if not few or few[-1] / tick >= apart:
            few.append(tick)
    axes.set_xticks(few, [size_words(size) for size in few])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("size of a message or part")


def counts_axis(axes: Axes, counts: Iterable[int], label: str) -> None:
    """A logarithmic axis of whole numbers, each of them labelled."""
    ticks = sorted(set(counts))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def log_values(axes: Axes) -> None:
    """A logarithmic axis of values, written as plain numbers."""
    axes.set_yscale("log")
    plain_log(axes.yaxis)


def plain_log(axis: Any) -> None:
    """1, 2, 5, 10 instead of powers of ten."""
    low, high = sorted(axis.get_view_interval())
    subs: tuple[float, ...] = (1.0, 2.0, 5.0) if high < 100 * max(low, 1e-12) else (1.0,)
    if high < 8 * max(low, 1e-12):
        subs = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


def line(axes: Axes, figures: Sequence[Figure], places: Sequence[float], label: str, style: int) -> None:
    """Medians joined by a line, quartiles as a band around it."""
    colour = COLOURS[style % len(COLOURS)]
    axes.fill_between(
        places, [f.low for f in figures], [f.high for f in figures], color=colour, alpha=0.15, lw=0
    )
    axes.plot(
        places, [f.value for f in figures], color=colour, marker=SHAPES[style % len(SHAPES)], label=label
    )  # fmt: skip


def dots(axes: Axes, figures: Sequence[Figure], labels: Sequence[str]) -> None:
    """A line for each figure: its spread, and its goal in red."""
    for place, figure in enumerate(reversed(figures)):
        spread(axes, figure, place)
        if figure.goal is not None:
            axes.plot([figure.goal.limit] * 2, [place - 0.4, place + 0.4], color=GOAL, lw=1.4)
    axes.set_yticks(range(len(figures)), [*reversed(labels)])
    axes.set_ylim(-0.6, len(figures) - 0.4)
    axes.grid(visible=False, axis="y")


def spread(axes: Axes, figure: Figure, place: float) -> None:
    """Median as a dot, quartiles as a bar, 99th percentile and largest as marks, on the line `place`."""
    line = [place, place]
    axes.plot([figure.low, figure.high], line, color=STOCK, alpha=0.4, lw=6, solid_capstyle="butt")
    axes.plot([figure.value], [place], color=STOCK, marker="o", ls="none")
    for name, value in figure.tail.items():
        axes.plot([value], [place], color=STOCK, marker="x" if name == "max" else "|", ms=6, ls="none")


def unit_words(unit: str) -> str:
    """A unit for an axis."""
    return "ratio" if unit == "ratio" else UNITS.get(unit, unit)


def size_words(size: float) -> str:
    """Bytes for people: 4 B, 64 KB, 16 MB (powers of 1024)."""
    for unit, step in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= step:
            return f"{size / step:g} {unit}"
    return f"{size:g} B"
