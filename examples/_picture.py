"""Pictures of what an example measured: one column, as wide as a phone, on a light card of its own (matplotlib)."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["BACK", "BLUE", "GREEN", "ORANGE", "RED", "marks", "panels", "rates", "save"]

# Okabe and Ito's, told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#D55E00", "#009E73", "#B2182B"
CARD = "#FCFCFC"
"""A dark page would swallow dark text: the picture brings its own light."""
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "multiworld",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "figure.facecolor": CARD,
    "savefig.facecolor": CARD,
    "axes.facecolor": CARD,
    "axes.edgecolor": "#8A8A8A",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}
BACK: Any = {"facecolor": CARD, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
"""Behind text that lies on lines."""
WIDTH = 4.2
"""Inches."""


def panels(title: str, *heights: float) -> tuple[Any, list[Any]]:
    """A canvas, and a panel for each height (inches), one below the other with one axis of time."""
    import matplotlib as mpl  # noqa: PLC0415  (only for a picture)
    from matplotlib.figure import Figure  # noqa: PLC0415  (only for a picture)

    mpl.rcParams.update(STYLE)
    canvas = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    grid = canvas.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    canvas.suptitle(title, x=0.02, ha="left", fontsize=9.5, fontweight="bold")
    return canvas, [*grid.flat]


def rates(times: Iterable[float], seconds: float, width: float = 1.0) -> tuple[list[float], list[float]]:
    """Middles of the whole parts of `seconds`, each `width` long, and how many of `times` a second lie in them."""
    counts = [0.0] * int(seconds / width)
    for at in times:
        if 0 <= at < width * len(counts):
            counts[int(at / width)] += 1 / width
    return [width * (part + 0.5) for part in range(len(counts))], counts


def marks(axes: Any, rows: dict[str, Iterable[float]], colour: str = RED) -> None:
    """A row of marks for each kind of thing that happened."""
    for at, times in enumerate(map(list, rows.values())):
        axes.plot(times, [-at] * len(times), "|", color=colour, markersize=9, markeredgewidth=1.6)
    axes.set_yticks([-at for at in range(len(rows))], [*rows])
    axes.set_ylim(0.7 - len(rows), 0.7)


def save(canvas: Any, file: str) -> None:
    """Write it as what its name says: .svg, .png."""
    if file.endswith(".svg"):
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        lines = [line.rstrip() for line in text.getvalue().splitlines()]  # the blanks are matplotlib's
        Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        canvas.savefig(file, dpi=200)
    print(f"picture: {file}", flush=True)
