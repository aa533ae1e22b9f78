"""docs/benchmarks/index.md from stored records: `python -m benchmarks.page RECORD...`.

A part is taken from the newest full run that has all of it, else from the newest quick one. What is written follows
from the records, the goals and notes.toml alone: written again, it is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import records
from benchmarks.figures.goals import TARGETS, answers
from benchmarks.figures.machine import words
from benchmarks.figures.table import measure, number, spread, verdict
from benchmarks.page import notes as texts
from benchmarks.page.pictures import draw_all
from benchmarks.parts import OWN_PAGE, PARTS, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.figures.figure import Figure
    from benchmarks.figures.goals import Target
    from benchmarks.figures.records import PartRun, Record
    from benchmarks.page.notes import Notes
    from benchmarks.page.pictures import Picture

FOLDER = records.ROOT / "docs" / "benchmarks"
_CASES = re.compile(r"(?P<row>[^/]+/[^/]+/\d+)/(?P<column>.+)")
LAYOUTS = {
    "messages": _CASES,
    "collectives": _CASES,
    "limits": _CASES,
    "thresholds": _CASES,
    "fanin": re.compile(r"(?P<row>\d+/[^/]+)/(?P<column>.+)"),
    "worlds": re.compile(r"(?P<row>[a-z_]+)/(?P<column>\d+)"),
}
"""Parts whose figures stand in a grid: what is a row's name, and what a column's."""
HEAD = """# Speed

This page shows what worlds cost beside plain `torch.distributed` (stock), and how long faults take to be detected and
healed. A line is the median, its band the first to the third quartile, red a goal; where times are compared, less than 1
is faster than stock. The [goals](#goals) follow the pictures, then the [method](#method) and the figures of each part.

"""
METHOD = """## Method

Ratios are ours/stock, measured side by side: both in the same processes (pymultiworld and this package: each in its own),
their rounds taking turns, a ratio for each round. Tables have the median of the rounds and, as its spread, the first and
third quartile. Absolute values are those of one machine. A ratio stands in brackets behind the absolute value, and a
figure that misses its goal is bold.

The limits, MPI and a plain socket pair are measured in the same way, their rounds between the others'.

A measured process does nothing else; garbage is collected between rounds, torch has one thread. In stock's rounds
multiworld's routing is taken out of torch. The first rounds are dropped. The forms of a round change places from round
to round.

The records:

"""
REPEAT = """## Repeat it

```
nox -s bench                            # about five minutes; prints a table, writes JSON to out/benchmarks/
nox -s bench -- --full                  # every size, count and form; 40 minutes
nox -s bench -- --only messages worlds  # some parts
nox -s bench -- --only thresholds       # collectives over the lane against gloo: a table of both
nox -s bench -- --full --keep --page    # keep the record in benchmarks/results/, and write this page from it
```

Each part has options of its own: `.nox/bench/bin/python -m benchmarks.messages --help`, once nox has made that
environment. MPI is measured where `openmpi-bin` and mpi4py are installed. The quick form leaves pymultiworld out where its environment is not in the cache. A run is compared with the last one of the same
form on the same kind of machine, and says which figures have changed by more than their spreads; any two records:
`python -m benchmarks --compare OLDER NEWER`. `python -m benchmarks.page RECORD...` writes this page from records.
"""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A part on the page.

    Attributes:
        title: of the part.
        description: of the part.
        record: whose figures.
        run: how it went.
        figures: its figures.
        torch: what the part measures, where that is not the torch of the record's machine.
    """

    title: str
    description: str
    record: Record
    run: PartRun
    figures: tuple[Figure, ...]
    torch: str = ""


def chosen_of(found: Iterable[Record]) -> dict[str, Record]:
    """For each part the newest record of it: one that ended before one that broke off, then full before quick.

    Parts that there are no more stay in the records; those with a page of their own are not on this one.
    """
    chosen: dict[str, Record] = {}
    for record in sorted(found, key=lambda record: record.when):
        for part in record.parts:
            shown = part in PARTS and part not in OWN_PAGE and record.of(part)
            if shown and (part not in chosen or _worth(record, part) >= _worth(chosen[part], part)):
                chosen[part] = record
    return chosen


def _worth(record: Record, part: str) -> tuple[bool, bool]:
    run = record.parts[part]
    return not run.missing, run.form == "full"


def aimed(figures: Iterable[Figure]) -> tuple[Figure, ...]:
    """The figures as they are aimed at now: goals of an older record that were given up since are left out."""
    return tuple(
        figure if any(target.takes(figure) for target in TARGETS) else dataclasses.replace(figure, goal=None)
        for figure in figures
    )


def render(
    shown: Mapping[str, Shown], names: Mapping[str, str], notes: Notes, pictures: Iterable[Picture]
) -> str:
    """The page.

    Args:
        shown: the parts, in order.
        names: for each record's time, the name of its file.
        notes: the texts by hand.
        pictures: those that there are, in order.

    Raises:
        ValueError: a figure's goal is not in `benchmarks.figures.goals`.
    """
    figures = [figure for part in shown.values() for figure in part.figures]
    pictures = [*pictures]
    text = (
        HEAD
        + _pictures(each for each in pictures if each.opens)
        + _goals(figures)
        + METHOD
        + _runs(shown, names)
        + REPEAT
    )
    for name, part in shown.items():
        text += _part(name, part, notes, [each for each in pictures if each.part == name and not each.opens])
    return text


def _pictures(pictures: Iterable[Picture]) -> str:
    """One paragraph: as many pictures stand side by side as the page is wide. Each has its title in it."""
    text = "".join(f"![{each.title}]({each.name}.svg)\n" for each in pictures)
    return text and text + "\n"


def _runs(shown: Mapping[str, Shown], names: Mapping[str, str]) -> str:
    """Which runs the figures are of, on what."""
    by_record: dict[str, list[str]] = {}
    for name, part in shown.items():
        by_record.setdefault(part.record.when, []).append(name)
    lines = []
    for when, parts in by_record.items():
        record = shown[parts[0]].record
        of = f"multiworld {record.multiworld}" + (f", commit {record.commit}" if record.commit else "")
        of += f", sources {record.sources or 'not recorded'}"
        before, after = (record.machine.get(name) for name in ("load_before", "load_after"))
        load = (
            ""
            if before is None or after is None
            else f", load {number(before)} before and {number(after)} after"
        )
        given = f", with `{' '.join(record.options)}`" if record.options else ""
        forms = ", ".join(
            f"{part} ({', torch '.join(filter(None, [shown[part].run.form, shown[part].torch]))})"
            for part in parts
        )
        lines.append(
            f"- {forms}: {when[:16].replace('T', ' ')} UTC, {of}, on {words(record.machine)}{load}{given}; "
            f"record [{names[when]}](../../benchmarks/results/{names[when]})\n"
        )
    return "".join(lines) + "\n"


def _goals(figures: Sequence[Figure]) -> str:
    with_goal = [figure for figure in figures if figure.goal is not None]
    met = sum(bool(figure.met) for figure in with_goal)
    unsure = sum(bool(figure.met) and figure.unsure for figure in with_goal)
    text = f"## Goals\n\n{met} of the {len(with_goal)} figures that have a goal reach it"
    text += f", {unsure} of them within error: {met - unsure} reach it for certain.\n"
    text += "Goals of messages are about two members, those of collectives about two and four. *Within error* says that another run may say "
    text += "otherwise: the limit lies within the 95 % interval of the median, "
    text += "1.81 times the interquartile range over √samples to either side; of fewer than four samples 10 % of the value at least. "
    text += "A 99th percentile is within error where the limit lies between the 95th and the largest, and always with fewer than 100 "
    text += "samples.\n\n"
    text += "| goal | limit | figure | measured | spread | |\n|---|---|---|---|---|---|\n"
    for target, found in answers(figures):
        if not found:
            text += f"| {target.what} | {target.limit} | - | not measured | | |\n"
        for place, figure in enumerate(found):
            what, limit = (target.what, target.limit) if place == 0 else ("", "")
            word = verdict(figure) if figure.met else f"**{verdict(figure)}**"
            word += ", within error" if figure.unsure else ""
            text += f"| {what} | {limit or _own_limit(target, figure)} | {figure.key} | "
            text += f"{measure(figure.value, figure.unit)} | {spread(figure)} | {word} |\n"
    return text + "\n"


def _own_limit(target: Target, figure: Figure) -> str:
    """Of a target whose figures have limits of their own."""
    return "" if target.limit else f"{figure.goal} {'' if figure.unit == 'ratio' else figure.unit}".strip()


def _part(name: str, part: Shown, notes: Notes, pictures: Sequence[Picture]) -> str:
    text = f"\n## {part.title}\n\n{part.description}\n\n" + _pictures(pictures)
    if name in notes.parts:
        text += notes.parts[name].strip() + "\n\n"
    layout = LAYOUTS.get(name)
    placed = {
        figure.key: found for figure in part.figures if layout and (found := layout.fullmatch(figure.name))
    }
    if placed:
        text += _grid([figure for figure in part.figures if figure.key in placed], placed)
    rest = [figure for figure in part.figures if figure.key not in placed]
    if rest:
        text += _list(rest)
    for remark in (*part.run.remarks, *filter(None, [part.run.missing])):
        text += f"- {remark}\n"
    text += "\n" if part.run.remarks or part.run.missing else ""
    for key, said in notes.of(name):
        text += f"**`{key.partition('/')[2]}`.** {said.strip()}\n\n"
    return text.rstrip("\n") + "\n"


def _grid(figures: Sequence[Figure], placed: Mapping[str, re.Match[str]]) -> str:
    """A row for each case, a column for each form; a ratio stands behind the absolute value."""
    rows: dict[str, dict[str, Figure]] = {}
    columns: dict[str, None] = {}
    for figure in figures:
        row, column = placed[figure.key].group("row", "column")
        rows.setdefault(row, {})[column] = figure
        columns[column] = None
    order = sorted(columns, key=int) if all(column.isdigit() for column in columns) else [*columns]
    text = f"| | {' | '.join(order)} |\n|---|{'---|' * len(order)}\n"
    for row, cells in rows.items():
        text += f"| {row} | {' | '.join(_cell(cells.get(column)) for column in order)} |\n"
    return text + "\n"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.unit == "ratio" and figure.absolute is not None:
        text = f"{measure(figure.absolute, figure.absolute_unit)} ({number(figure.value)})"
    else:
        text = measure(figure.value, figure.unit)
    return f"**{text}**" if figure.met is False else text


def _list(figures: Sequence[Figure]) -> str:
    beside = any(figure.absolute is not None or figure.baseline is not None for figure in figures)
    text = "| figure | " + ("measured | against | " if beside else "") + "value | spread | samples | what |\n"
    text += "|---|" + ("---|---|" if beside else "") + "---|---|---|---|\n"
    for figure in figures:
        both = (figure.absolute, figure.baseline)
        sides = "".join(f"{measure(side, figure.absolute_unit)} | " for side in both) if beside else ""
        value = measure(figure.value, figure.unit)
        text += f"| {figure.name} | {sides}{f'**{value}**' if figure.met is False else value} | "
        text += f"{spread(figure)} | {figure.samples} | {figure.note.replace('|', '/')} |\n"
    return text + "\n"


def write(paths: Iterable[Path], folder: Path = FOLDER) -> Path:
    """Write the page and its pictures; the page's path.

    Args:
        paths: the records, in benchmarks/results/.
        folder: where to; pictures of earlier pages there are removed.

    Raises:
        BadRecord: a file is none.
        ValueError: see `render`.
    """
    found = {path.name: records.load(path) for path in paths}
    figures = [figure for part, record in chosen_of(found.values()).items() for figure in record.of(part)]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(figures, folder)
    for old in {*folder.glob("*.svg")} - {folder / f"{each.name}.svg" for each in drawn}:
        old.unlink()
    path = folder / "index.md"
    path.write_text(text_of(found, drawn, texts.load()), encoding="utf-8")
    return path


def text_of(found: Mapping[str, Record], drawn: Iterable[Picture], notes: Notes) -> str:
    """The page from records.

    Args:
        found: the records, by the names of their files.
        drawn: the pictures that there are.
        notes: the texts by hand.

    Raises:
        ValueError: see `render`; or a text is about a part that there is not, or a figure that a part shown
            has not.
    """
    chosen = chosen_of(found.values())
    left = notes.strangers(PARTS, {part: record.of(part) for part, record in chosen.items()})
    if left:
        raise ValueError(f"notes.toml has texts that nothing answers to: {left}: correct their keys")
    shown = {}
    for name in sorted(chosen, key=PARTS.index):
        part, record = load(name), chosen[name]
        shown[name] = Shown(
            part.title, part.description, record, record.parts[name], aimed(record.of(name)), part.torch
        )
    own = [each for each in drawn if each.part in shown]
    return render(shown, {record.when: name for name, record in found.items()}, notes, own)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description="Write docs/benchmarks/.")
    parser.add_argument(
        "record", nargs="*", type=Path, help="kept in benchmarks/results/; default: all that are there"
    )
    args = parser.parse_args(argv)
    print(write(args.record or sorted(records.KEPT.glob("*.json"))))
    return 0
