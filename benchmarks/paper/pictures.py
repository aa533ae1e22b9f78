"""Pictures of docs/paper.md, drawn as those of the page of speed."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.page import drawing
from benchmarks.page.drawing import COLOURS, GOAL, SHAPES, STOCK
from benchmarks.paper.layout import CAUGHT, FORMS, TOPOLOGY_WORDS, WORDS
from benchmarks.paper.theirs import ELEMENTS, SECONDS, mb_per_s

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    from benchmarks.figures.figure import Figure
    from benchmarks.figures.records import Record

PART = "paper"
LABELS = {**WORDS, CAUGHT: "torch, a handler for each sender"}
TITLES = {
    "sizes": "Throughput over size, one leader and the most senders",
    "senders": "Throughput over the number of senders, a world for each",
    "fault": "A worker is killed while another sends",
    "join": "A worker joins while another sends",
    "theirs": "What pymultiworld's authors measured, within one host",
}


def draw_all(record: Record, folder: Path) -> list[str]:
    """Write every picture whose figures are there; their names."""
    return [
        name
        for name, words in TITLES.items()
        if drawing.draw(partial(DRAWN[name], record.of(PART)), words, folder / f"{name}.svg")
    ]


def _rated(figures: Sequence[Figure], **what: object) -> list[Figure]:
    return [
        each for each in figures
        if each.series.get("rates") and all(each.series.get(key) == value for key, value in what.items())
    ]  # fmt: skip


def _line(axes: Axes, figures: Sequence[Figure], key: str, form: str) -> None:
    found = {
        each.series[key]: median(each.series["rates"]) for each in figures if each.series["form"] == form
    }
    style = FORMS.index(form)
    if found:
        axes.plot(
            sorted(found), [found[each] for each in sorted(found)],
            color=COLOURS[style], marker=SHAPES[style], label=WORDS[form],
        )  # fmt: skip


def _sizes(figures: Sequence[Figure]) -> Canvas | None:
    rated = _rated(figures)
    if not rated:
        return None
    most = max(each.series["senders"] for each in rated)
    topologies = [each for each in TOPOLOGY_WORDS if _rated(figures, senders=most, topology=each)]
    canvas, axes = drawing.panels(*[2.3] * len(topologies))
    for topology, each in zip(topologies, axes, strict=True):
        own = _rated(figures, senders=most, topology=topology)
        for form in FORMS:
            _line(each, own, "bytes", form)
        drawing.bytes_axis(each, {figure.series["bytes"] for figure in own})
        drawing.log_values(each)
        each.set_title(f"{topology}, {most} senders")
        each.set_ylabel("MB/s")
    _legend(canvas, axes)
    return canvas


def _senders(figures: Sequence[Figure]) -> Canvas | None:
    rated = _rated(figures, topology="multi")
    sizes = sorted({each.series["bytes"] for each in rated})
    if not sizes:
        return None
    canvas, axes = drawing.panels(*[2.0] * len(sizes))
    for size, each in zip(sizes, axes, strict=True):
        own = _rated(rated, bytes=size)
        for form in FORMS:
            _line(each, own, "senders", form)
        each.set_xticks(sorted({figure.series["senders"] for figure in own}))
        each.set_xlabel("senders")
        drawing.log_values(each)
        each.set_title(f"messages of {drawing.size_words(size)}")
        each.set_ylabel("MB/s")
    _legend(canvas, axes)
    return canvas


def _over_time(figures: Sequence[Figure], what: str) -> Canvas | None:
    found = [each for each in figures if each.name.startswith(f"{what}/") and "event" in each.series]
    if not found:
        return None
    canvas, axes = drawing.panels(*[1.6] * len(found))
    for figure, each in zip(found, axes, strict=True):
        told = figure.series
        times = [told["bucket"] * (place + 0.5) for place in range(len(told["stays"]))]
        each.plot(times, told["stays"], color=COLOURS[0], label="the worker that sends all the time")
        label = "the one that is killed" if what == "fault" else "the one that joins"
        each.plot(times, told["other"], color=COLOURS[1], ls="--", label=label)
        each.axvline(told["event"], color=GOAL, lw=1)
        if told.get("join"):
            each.axvspan(told["event"], told["join"], color=GOAL, alpha=0.15, lw=0)
        each.set_title(LABELS[told["form"]])
        each.set_ylabel("messages/s")
        each.set_ylim(bottom=0)
    axes[-1].set_xlabel("s")
    _legend(canvas, axes, across=1)
    return canvas


def _theirs(figures: Sequence[Figure]) -> Canvas:
    ours = _rated(figures, senders=1, topology="multi", form="world")
    canvas, axes = drawing.panels(2.5, 2.3)
    for backend, each in zip(("gloo", "NCCL"), axes, strict=True):
        for style, way in enumerate(("single", "multi")):
            rates = [
                mb_per_s(count, seconds)
                for count, seconds in zip(ELEMENTS, SECONDS[backend, "one host"][way], strict=True)
            ]
            label = f"theirs, {way} world"
            each.plot(
                [4 * count for count in ELEMENTS],
                rates,
                color=COLOURS[style],
                marker=SHAPES[style],
                label=label,
            )
        if backend == "gloo" and ours:
            at = {figure.series["bytes"]: median(figure.series["rates"]) for figure in ours}
            each.plot(sorted(at), [at[size] for size in sorted(at)], color=STOCK, ls=":", label="World, here")
        each.set_title(f"{backend}, one host, one sender")
        each.set_xscale("log")
        each.set_xlabel("bytes")
        drawing.log_values(each)
        each.set_ylabel("MB/s")
    _legend(canvas, axes)
    return canvas


def _legend(canvas: Canvas, axes: Sequence[Axes], across: int = 2) -> None:
    found: dict[str, Any] = {}
    for each in axes:
        handles, labels = each.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    canvas.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(across, len(found)))


DRAWN: dict[str, Any] = {
    "sizes": _sizes,
    "senders": _senders,
    "fault": lambda figures: _over_time(figures, "fault"),
    "join": lambda figures: _over_time(figures, "join"),
    "theirs": _theirs,
}
