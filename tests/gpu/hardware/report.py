"""What was run on hardware as a page of the documentation. Pure: records in, Markdown out."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from matrix.catalogue import GROUPS
from matrix.modes import MODES
from matrix.outcome import ALIVE
from matrix.words import together, words

from hardware import risks
from hardware.costs import COSTS
from hardware.fidelity import Alike, Answer, as_on_the_bed, bed_rows
from hardware.paper import PAPER
from hardware.placements import PLACEMENTS
from hardware.selection import CHECKS, HARDWARE, wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matrix.outcome import Row
    from matrix.results import Results
    from matrix.scenario import Scenario

    from hardware.records import Check, Records, Run

__all__ = ["page"]

_HEAD = """\
# On real GPUs

This page compares NCCL's failures on real GPUs with those on [the test bed](nccl-defects.md), which is a fake: the same
programs, the same faults (a peer killed or stopped while an operation is pending), the same questions. `nox -s gpu` runs
them and writes the page. [The shim](shim.md#seen-on-a-gpu) has a summary, [hardware.json](hardware.json) the data.
"""

_NOTHING = """\
## Nothing was run yet

Not one scenario was run on a GPU since this page was begun, on {since}: no machine with one was to be had. Whatever the
other pages say of NCCL's failures was seen on the test bed. Below is how to change that.
"""

_HOW = """\
## Run it

On a machine with an NVIDIA GPU and its driver; one GPU is enough.

```
nox -s gpu                                                    # torch 2.14.1, installed by the session
nox -s gpu -- --gpu patched-2.6.0=VENV/bin/python             # a build of yours; may be given several times
nox -s gpu -- --only 'lost.*' --modes aeh2 --repeat 5         # a part of it; --help, --list
nox -s gpu -- --short risks costs                             # minutes: worlds, cells, risks, costs, paper, or several
```

It asks the interpreter which GPUs, driver and NCCL there are, tries how ranks can share them, checks the values of
every collective, breaks, isolates and rejoins worlds of multiworld, loses peers in the moments in which NCCL or CUDA may
do what a fake does not (a group destroyed with an operation pending, a large payload, a live graph), measures worlds beside
plain torch, and runs every scenario whose fault is a signal.
Faults that only a fake can make (an abort that hangs, a call that fails) are not here. What was run is
kept when it is interrupted, and a later run adds to it. Without a GPU it says so and ends with 1.

How ranks are put on GPUs:

{placements}
With one GPU the first of the two ways to share it that NCCL accepts is taken; with several the others are run too. Over
sockets NCCL learns that a peer is gone; between GPUs of one host it may not.
"""

_LEGEND = """\
*unblocked* is from the fault until the thread that met it has come through its call and the reading of the result, or
until the process died: median / maximum over the runs. Modes that end alike share a line. *as on the bed*: whether the
process's end and what every step returned or raised are those of the same cell of [the matrix](nccl-defects.md); `-`:
the cell was not run there. *sources*, *series*: digests of the code it was run with, and of the patches in the build;
*not recorded*: it was run before they were kept.
"""

NOT_RECORDED = "not recorded"


def page(records: Records, bed: Results) -> str:
    """Write the page.

    Args:
        records: of hardware.
        bed: of the matrix, to compare with.
    """
    parts = [_HEAD]
    if records.runs:
        parts += [_summary(records.runs, bed), _LEGEND]
        parts += [*(_run(run, bed) for run in records.runs), _modes(records.runs)]
    else:
        parts.append(_NOTHING.format(since=records.since))
    listed = "".join(f"- `{each.id}`: {each.title}\n" for each in PLACEMENTS.values())
    parts.append(_HOW.format(placements=listed))
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _title(run: Run) -> str:
    return f"{run.column.target.name}, {run.column.placement}, {run.column.gpu}"


def _summary(runs: Sequence[Run], bed: Results) -> str:
    lines = []
    for run in runs:
        head = run.column
        answers = [answer.alike for _, _, answer in _answers(run, bed)]
        known = [each for each in answers if each is not Alike.UNKNOWN]
        lines.append(
            [
                head.target.name,
                head.placement,
                head.gpu,
                head.driver or "unknown",
                head.torch,
                head.cuda,
                head.nccl or "unknown",
                ", ".join(head.topics) or "-",
                f"{sum(check.right for check in run.checks)} of {len(run.checks)}{_not_run(run)}",
                f"{len(answers)} of {len(wanted())} cells, {sum(not row.failure for row in run.rows)} runs",
                f"{known.count(Alike.YES)} of {len(known)}",
                head.date,
                head.sources or NOT_RECORDED,
                (head.series or NOT_RECORDED) if head.topics else "-",
            ]
        )
    head = [
        "build and backend", "placement", "GPU", "driver", "torch", "CUDA", "NCCL", "patches", "checks right", "run",
        "as on the bed", "on", "sources", "series",
    ]  # fmt: skip
    return "## What was run\n\n" + _table(head, lines)


def _run(run: Run, bed: Results) -> str:
    parts = [f"## {_title(run)}\n"]
    if run.checks:
        lines = [[check.name, _cell(check.outcome), _looked(check), _ms(check.ms)] for check in run.checks]
        parts.append(_table(["values and worlds", "outcome", "looked at", "loss to exception, ms"], lines))
    parts += [
        f"### {check.name} ({run.column.target.name})\n\n" + _figures(check)
        for check in run.checks
        if check.figures
    ]
    answers = _answers(run, bed)
    for group in GROUPS:
        lines = _lines([each for each in answers if each[0].group == group])
        if lines:
            head = ["scenario", "mode", "outcome", "unblocked, ms", "as on the bed"]
            parts.append(
                f"### {group} ({run.column.target.name}, {run.column.placement})\n\n" + _table(head, lines)
            )
    differing = [
        [f"`{scenario.id}`", rows[0].mode, _outcome(rows), answer.bed]
        for scenario, rows, answer in answers
        if answer.alike in {Alike.NO, Alike.PARTLY}
    ]
    if differing:
        head = ["scenario", "mode", "hardware", "test bed"]
        parts.append(
            f"### Not as on the bed ({run.column.target.name}, {run.column.placement})\n\n"
            + _table(head, differing)
        )
    if run.lacking:
        parts.append(f"Not run, for want of GPUs: {'; '.join(run.lacking)}.\n")
    parts += _missing(run)
    return "\n".join(parts)


def _figures(check: Check) -> str:
    """Write what was measured, and how many times plain torch's it is."""
    if all(each.plain is None for each in check.figures):
        lines = [[each.name, _amount(each.value, each.unit)] for each in check.figures]
        return _table(["measured", "median"], lines)
    lines = [
        [
            each.name,
            _amount(each.value, each.unit),
            _amount(each.plain, each.unit),
            f"{each.value / each.plain:.2f}",
        ]
        for each in check.figures
        if each.plain
    ]
    return _table(["operation", "world", "plain torch", "times"], lines)


def _amount(value: float, unit: str) -> str:
    """Write a figure with a unit of which it has one to a thousand, and three digits."""
    larger = {"us": "ms", "ms": "s", "MiB": "GiB"}
    while value >= 1000 and unit in larger:
        value, unit = value / (1024 if unit == "MiB" else 1000), larger[unit]
    return f"{value:.3g} {unit}"


def _not_run(run: Run) -> str:
    count = len(_checks_left_out(run))
    return f", {count} not run" if count else ""


def _checks_left_out(run: Run) -> list[str]:
    known = (*CHECKS, *risks.names(patched=run.column.target.patched), *COSTS, PAPER)
    return [name for name in known if name not in {check.name for check in run.checks}]


def _missing(run: Run) -> list[str]:
    """Say what a whole record would have and this one has not, and why."""
    there = {(row.scenario, row.mode) for row in run.rows}
    lacking = {each.partition(":")[0] for each in run.lacking}
    cells = Counter(name for name, mode in wanted() if (name, mode) not in there and name not in lacking)
    said = [f"`{name}` ({count} modes)" for name, count in cells.items()] + _checks_left_out(run)
    if not said:
        return []
    why = "; ".join(run.left_out) or "the reason was not recorded"
    return [f"**Not in this record**: {', '.join(said)}. Why: {why}.\n"]


def _answers(run: Run, bed: Results) -> list[tuple[Scenario, list[Row], Answer]]:
    """Return each cell's runs, and how they compare."""
    theirs = bed_rows(bed, run.column.target)
    by_cell: dict[tuple[str, str], list[Row]] = {}
    for row in run.rows:
        by_cell.setdefault((row.scenario, row.mode), []).append(row)
    return [
        (scenario, rows, as_on_the_bed(rows, theirs.get((scenario.id, mode), [])))
        for scenario in HARDWARE
        for mode in scenario.modes
        if (rows := by_cell.get((scenario.id, mode)))
    ]


def _lines(answers: Iterable[tuple[Scenario, list[Row], Answer]]) -> list[list[str]]:
    """Write a group's lines: modes in which a scenario ends alike, times aside, share one."""
    merged: dict[tuple[str, frozenset[str], Alike], list[list[Row]]] = {}
    titles: dict[str, str] = {}
    for scenario, rows, answer in answers:
        said = frozenset(words(row).text for row in rows)
        merged.setdefault((scenario.id, said, answer.alike), []).append(rows)
        titles.setdefault(scenario.id, scenario.title)
    lines = []
    for (name, _, alike), cells in merged.items():
        rows = [row for cell in cells for row in cell]
        title = titles.pop(name, "")
        times = [time for row in rows if (time := _unblocked(row)) is not None]
        modes = ", ".join(cell[0].mode for cell in cells)
        lines.append(
            [f"`{name}`" + (f": {title}" if title else ""), modes, _outcome(rows), _ms(times), str(alike)]
        )
    return lines


def _outcome(rows: Sequence[Row]) -> str:
    return _cell(together([words(row) for row in rows]))


def _looked(check: Check) -> str:
    known = Counter(each.rpartition(": ")[2] for each in check.defects)
    told = [f"{check.done}"]
    told += [f"{check.refused} refused"] if check.refused else []
    return ", ".join(told + [f"{count} wrong by {issue}" for issue, count in known.items()])


def _unblocked(row: Row) -> int | None:
    """The time of the observer that waited longest, where all came through or died."""
    times = [
        seen.unblocked_ms if seen.end == ALIVE else seen.ended_ms for seen in row.seen if seen.step("caller")
    ]
    known = [max(0, time) for time in times if time is not None]
    return max(known) if known and len(known) == len(times) else None


def _ms(times: Sequence[int]) -> str:
    return f"{statistics.median(times):.0f} / {max(times)}" if times else "-"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def _modes(runs: Sequence[Run]) -> str:
    used = {row.mode for run in runs for row in run.rows}
    lines = [
        [f"`{mode.id}`", mode.title, " ".join(f"`{name}={value}`" for name, value in mode.env.items()) or "-"]
        for mode in MODES.values()
        if mode.id in used
    ]
    return "## The modes\n\n" + _table(["mode", "meaning", "environment"], lines) if lines else ""
