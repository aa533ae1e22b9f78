"""Pictures of the page: each makes a canvas from a record's figures, or None without them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.page import drawing
from benchmarks.page.drawing import STOCK
from benchmarks.worlds.part import USUAL, plain_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    from benchmarks.figures.figure import Figure

FORMS = {
    "stock": "torch.distributed",
    "with": "with w: around a call",
    "world": "World",
    "aio": "World.aio",
    "wire": "World, no memory read",
    "floor": "socket pair",
}
"""The forms that are drawn; the tables have the others, which lie next to one of these."""
WAYS = {
    "stock_irecv": "one stock group, irecv",
    "stock_threads": "one stock group, threads",
    "irecv": "worlds, irecv",
    "threads": "worlds, threads",
    "aio": "worlds, asyncio",
    "communicator": "worlds, WorldCommunicator",
}
PHASES = {
    "noticed": "until the last member knows of the break",
    "began": "until its join has begun",
    "active": "until the next generation is active",
    "first": "until its first operation is done",
}
PER_WORLD = {"join": "time to join", "threads": "threads", "descriptors": "descriptors", "memory": "memory"}


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: of its file, without the ending.
        part: whose figures it shows.
        title: for those who cannot see it, and below it.
        draw: from the part's figures to a canvas; None if there is nothing to draw.
        opens: it stands at the page's opening, otherwise with its part.
    """

    name: str
    part: str
    title: str
    draw: Callable[[Sequence[Figure]], Canvas | None]
    opens: bool = True


def draw_all(figures: Sequence[Figure], folder: Path) -> list[Picture]:
    """Write every picture whose figures are there; those that were written, in order."""
    drawn = []
    for picture in PICTURES:
        own = [figure for figure in figures if figure.part == picture.part]
        if drawing.draw(partial(picture.draw, own), picture.title, folder / f"{picture.name}.svg"):
            drawn.append(picture)
    return drawn


def _told(figures: Iterable[Figure], **what: Any) -> list[Figure]:
    """The figures whose series say so, without those of tails."""
    return [
        figure
        for figure in figures
        if all(figure.series.get(key) == value for key, value in what.items())
        and not figure.name.endswith(("/p99", "/p99_to_median"))
    ]


def _has(figures: Iterable[Figure], key: str) -> list[Any]:
    """The values that a key of the series takes, in ascending order."""
    return sorted({figure.series[key] for figure in figures if key in figure.series})


def _ratio_over_size(figures: Sequence[Figure], op: str) -> Canvas | None:
    figures = [figure for figure in _told(figures, op=op) if figure.unit == "ratio"]
    members = _has(figures, "members")
    if not members:
        return None
    canvas, axes = drawing.panels(*[2.5] * len(members))
    for count, each in zip(members, axes, strict=True):
        own = _told(figures, members=count)
        for style, form in enumerate(FORMS):
            points = sorted(_told(own, form=form), key=lambda figure: figure.series["bytes"])
            if points:
                places = [figure.series["bytes"] for figure in points]
                drawing.line(each, points, places, FORMS[form], style)
        each.axhline(1, color=STOCK, lw=1, ls="--")
        drawing.bytes_axis(each, _has(own, "bytes"))
        drawing.log_values(each)
        each.set_title(f"{count} members")
        each.set_ylabel("time / torch's")
    _legend(canvas, axes)
    return canvas


def _throughput(figures: Sequence[Figure]) -> Canvas | None:
    own = _told(figures, op="send_recv", members=2)
    if not own:
        return None
    canvas, (axes,) = drawing.panels(2.5)
    for style, form in enumerate(FORMS):
        rates = {
            figure.series["bytes"]: _middle(figure.series["gb_per_s"])
            for figure in _told(own, form=form)
            if figure.series.get("gb_per_s")
        }
        if rates:
            colour, shape = drawing.COLOURS[style], drawing.SHAPES[style]
            places = sorted(rates)
            values = [1e3 * rates[size] for size in places]
            axes.plot(places, values, color=colour, marker=shape, label=FORMS[form])
    drawing.bytes_axis(axes, _has(own, "bytes"))
    drawing.log_values(axes)
    axes.set_title("send_recv, 2 members")
    axes.set_ylabel("MB/s")
    _legend(canvas, [axes])
    return canvas


def _fanin(figures: Sequence[Figure]) -> Canvas | None:
    rated = [figure for figure in figures if figure.series.get("rates")]
    sizes = _has(rated, "bytes")
    if not sizes:
        return None
    canvas, axes = drawing.panels(*[2.2] * len(sizes))
    for size, each in zip(sizes, axes, strict=True):
        own = _told(rated, bytes=size)
        unit = next(iter(own)).absolute_unit or next(iter(own)).unit
        for style, form in enumerate(WAYS):
            rates = {
                figure.series["workers"]: _middle(figure.series["rates"]) for figure in _told(own, form=form)
            }
            if rates:
                colour, shape = drawing.COLOURS[style], drawing.SHAPES[style]
                dashes = "--" if form.startswith("stock") else "-"
                places = sorted(rates)
                values = [rates[count] for count in places]
                each.plot(places, values, dashes, color=colour, marker=shape, label=WAYS[form])
        drawing.counts_axis(each, _has(own, "workers"), "workers that one leader receives from")
        each.set_ylim(bottom=0)
        each.set_title(f"messages of {drawing.size_words(size)}")
        each.set_ylabel("messages/s, all together" if unit == "1/s" else f"{unit}, all together")
    _legend(canvas, axes)
    return canvas


def _worlds(figures: Sequence[Figure]) -> Canvas | None:
    found = {kind: _by_count(figures, kind) for kind in PER_WORLD}
    kinds = [kind for kind, points in found.items() if len(points) > 1]
    if not kinds:
        return None
    canvas, axes = drawing.panels(*[2.2] * len(kinds))
    for kind, each in zip(kinds, axes, strict=True):
        forms = [(kind, "one after the other" if kind == "join" else "")]
        if kind == "join":
            forms += [("join_threads", "by threads"), ("join_async", "join_async, gathered")]
        for style, (name, label) in enumerate(forms):
            points = _by_count(figures, name)
            drawing.line(each, [*points.values()], [*points], label, style)
        points = found[kind]
        for limit in _limits(points.values()):
            each.axhline(limit, color=drawing.GOAL, lw=1.2, ls="--")
            each.annotate("goal", (min(points), limit), color=drawing.GOAL, fontsize=8, va="bottom")
        for usual in [figure for figure in figures if figure.name == plain_name(USUAL, kind)]:
            each.axhline(usual.value, color=STOCK, lw=1, ls=":", label=f"a plain gloo group, {USUAL}")
            each.legend()
        drawing.counts_axis(each, points, "worlds in the process")
        each.set_ylim(0, 1.1 * each.get_ylim()[1])
        each.set_title(f"{PER_WORLD[kind]}, for each world")
        each.set_ylabel(drawing.unit_words(next(iter(points.values())).unit))
    return canvas


def _limits(figures: Iterable[Figure]) -> list[float]:
    return sorted({figure.goal.limit for figure in figures if figure.goal is not None})


def _by_count(figures: Iterable[Figure], kind: str) -> dict[int, Figure]:
    """The figures named "kind/COUNT", by count."""
    found = {}
    for figure in figures:
        name, _, count = figure.name.partition("/")
        if name == kind and count.isdigit():
            found[int(count)] = figure
    return dict(sorted(found.items()))


def _detection(figures: Sequence[Figure]) -> Canvas | None:
    kinds = [kind for kind in ("crash", "stop") if _samples(figures, kind)]
    if not kinds:
        return None
    canvas, axes = drawing.panels(*[2.9] * len(kinds))
    for kind, each in zip(kinds, axes, strict=True):
        for style, (count, values) in enumerate(_samples(figures, kind).items()):
            shares = [place / len(values) for place in range(len(values) + 1)]
            label = f"{count} world{'' if count == 1 else 's'} ({len(values)} faults)"
            each.step([values[0], *values], shares, where="post", color=drawing.COLOURS[style], label=label)
        floors = [
            figure for figure in figures if figure.name.startswith(kind) and figure.name.endswith("/floor")
        ]
        if floors:
            label = "end of a plain TCP connection, median"
            each.axvline(floors[0].value, color=STOCK, lw=1, ls=":", label=label)
        for figure in figures:
            if figure.goal is not None and figure.name == f"{kind}/1/p99":
                each.axvline(
                    figure.goal.limit,
                    color=drawing.GOAL,
                    lw=1.2,
                    ls="--",
                    label="goal, 99th percentile",
                )
        if min(min(values) for values in _samples(figures, kind).values()) > 0:
            each.set_xscale("log")
            drawing.plain_log(each.xaxis)
        each.set_ylim(0, 1.02)
        crash = kind == "crash"
        each.set_title("killed" if crash else "stopped")
        each.set_xlabel("ms from the signal to the program's knowing" if crash else "ms beyond hang_timeout")
        each.set_ylabel("share of the faults")
        each.legend(loc="upper left", bbox_to_anchor=(0, -0.28), borderaxespad=0)
    return canvas


def _samples(figures: Iterable[Figure], kind: str) -> dict[int, list[float]]:
    """All times of a kind of fault, by number of worlds, in ascending order."""
    found: dict[int, list[float]] = {}
    for figure in figures:
        name, _, rest = figure.name.partition("/")
        count = rest.partition("/")[0]
        if name == kind and count.isdigit() and figure.series.get("ms"):
            found[int(count)] = sorted(figure.series["ms"])
    return dict(sorted(found.items()))


def _rebuild(figures: Sequence[Figure]) -> Canvas | None:
    """A bar for each kind of break: where its time went, at the median; below it the total's spread."""
    if not figures:
        return None
    canvas, (axes,) = drawing.panels(2.2 + 0.45 * len(figures))
    for place, figure in enumerate(reversed(figures)):
        reached = 0.0
        for style, phase in enumerate(PHASES):
            until = figure.series.get("timeline", {}).get(phase)
            if until is not None:
                more, colour = max(0.0, until - reached), drawing.COLOURS[style]
                axes.barh(place + 0.1, more, 0.42, left=reached, color=colour, label=PHASES[phase])
                reached = max(reached, until)
        drawing.spread(axes, figure, place - 0.27)
    for limit in _limits(figures):
        axes.axvline(limit, color=drawing.GOAL, lw=1.2, ls="--", label="goal for the median, after a crash")
    axes.set_yticks(range(len(figures)), [figure.name for figure in reversed(figures)])
    axes.set_ylim(-0.6, len(figures) - 0.4)
    axes.set_xlim(left=0)
    late = "99th percentile (|), " if any("p99" in figure.tail for figure in figures) else ""
    axes.set_xlabel(f"ms after the break\nbelow a bar: median, quartiles,\n{late}largest (x)")
    axes.grid(visible=False, axis="y")
    _legend(canvas, [axes], across=1)
    return canvas


def units_of(figures: Iterable[Figure]) -> list[str]:
    """Ratios first; the same order for the same figures."""
    return sorted({figure.unit for figure in figures}, key=lambda unit: (unit != "ratio", unit))


def _dots(figures: Sequence[Figure]) -> Canvas | None:
    """A panel for each unit that several figures have, on logarithmic axes."""
    shown = [figure for figure in figures if figure.low > 0]
    panels = {unit: [figure for figure in shown if figure.unit == unit] for unit in units_of(shown)}
    panels = {unit: own for unit, own in panels.items() if len(own) > 2}
    if not panels:
        return None
    canvas, axes = drawing.panels(*[0.7 + 0.22 * len(own) for own in panels.values()])
    for (unit, own), each in zip(panels.items(), axes, strict=True):
        drawing.dots(each, own, [figure.name for figure in own])
        each.set_xscale("log")
        drawing.plain_log(each.xaxis)
        if unit == "ratio":
            each.axvline(1, color=STOCK, lw=1, ls="--")
        each.set_xlabel(_ratio_words(own) if unit == "ratio" else drawing.unit_words(unit))
    return canvas


def _ratio_words(figures: Sequence[Figure]) -> str:
    rates = any(figure.absolute_unit.endswith("/s") for figure in figures)
    return "ours / theirs" + ("\nthroughput: more is better\ntimes: less is better" if rates else "")


def _middle(value: float | Sequence[float]) -> float:
    """Of rounds the median; a single value is that already."""
    return float(value) if isinstance(value, (int, float)) else median(value)


def _legend(canvas: Canvas, axes: Sequence[Axes], across: int = 2) -> None:
    """One for all panels, below them."""
    found: dict[str, Any] = {}
    for each in axes:
        handles, labels = each.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    canvas.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(across, len(found)))


PICTURES = (
    Picture(
        "messages", "messages", "Time of a message (send, recv) against torch.distributed",
        lambda figures: _ratio_over_size(figures, "send_recv"),
    ),
    Picture(
        "all-reduce", "collectives", "Time of an all_reduce against torch.distributed",
        lambda figures: _ratio_over_size(figures, "all_reduce"),
    ),
    Picture("detection", "detection", "Time to detect a lost member: all faults, as a share", _detection),
    Picture("rebuild", "rebuild", "From a world's break to the next generation's first operation", _rebuild),
    Picture("worlds", "worlds", "Cost of each world, by number of worlds", _worlds),
    Picture("fanin", "fanin", "One leader that receives from many workers", _fanin),
    Picture("throughput", "messages", "Throughput, by size of the message", _throughput, opens=False),
    Picture("overheads", "overheads", "Overheads of single calls and imports", _dots, opens=False),
    Picture("peers", "peers", "Against pymultiworld", _dots, opens=False),
)  # fmt: skip
"""In the order of the page: it opens with two side by side, of about the same height."""
