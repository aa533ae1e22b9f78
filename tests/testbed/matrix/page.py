"""The matrix as a page of the documentation. Pure: results in, Markdown out."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from matrix.catalogue import GROUPS, SCENARIOS
from matrix.cells import LEGACY
from matrix.compare import compare, pairs
from matrix.defects import DEFECTS, Finding, Verdict, verdict
from matrix.modes import CLEAN_UP, MODES
from matrix.outcome import ALIVE
from matrix.promises import kept
from matrix.words import together, words

if TYPE_CHECKING:
    from matrix.cells import Target
    from matrix.outcome import Row
    from matrix.results import Results
    from matrix.scenario import Scenario

__all__ = ["page"]

_HEAD = """\
# NCCL's failures, build by build

This page shows what each build of PyTorch does when NCCL fails, and what the patches change. [Patches](patching.md) explains
how they work.

`nox -s matrix` runs every line and writes the page: the unmodified ProcessGroupNCCL of each wheel, on the test bed, a fake of
CUDA and NCCL that fails on demand. The fake is a model; times are those of a small machine under load and say "at once" or
"after a timeout", not more. [nccl-defects.json](nccl-defects.json) has the data.
"""

NOT_RECORDED = "not recorded"

_DIGESTS = """\
*sources*: a digest of the test bed and the matrix that a column was run with; *series*: of the patches in the build.
*not recorded*: it was run before digests were kept, with a series that may have been changed since.
"""

_PROMISED = """\
## What a patched build promises

Under CleanUpOnly, whatever fails: the process lives; a blocked caller goes on within 2 s of the error (of the
operation's timeout, where NCCL reports none); after that `wait()`, `synchronize()` and the group's next operation raise
and name ncclRemoteError where that is what happened, and `exception()` is not None; a failing call raises and leaves no
NCCL group open; healthy groups go on, on the same thread and on others; the broken one is destroyed within 10 s, and a
new one works.
"""

_LEGEND = """\
## Every scenario

Times are from the fault until the thread that met it has come through its call and the reading of the result, or until
the process died. *blocked*: it was still in there when the observation ended, seconds after every timeout in play.
Waiting for an NCCL work only queues on a stream, so that `wait()` returns at once unless blocking wait is on; then the
reading is what blocks, and whether the failure can be learned is asked afterwards: of `wait()` again, of
`exception()`, and of the group's next operation. Modes that end alike share a line. Where the modes 0, 1 and 3 are
not named, only torch's default was run.
"""


def page(results: Results) -> str:
    """Write the page."""
    parts = [
        _HEAD,
        _builds(results),
        _defects(results),
        _promises(results),
        _stock_modes(results),
        _times(results),
        _modes(),
        _LEGEND,
    ]
    parts += [_group(results, group) for group in GROUPS]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _builds(results: Results) -> str:
    lines = []
    for column in results.columns:
        target, facts = column.target, column.facts
        what = "ProcessGroupNCCL" if target.implementation == LEGACY else "ProcessGroupNCCL2"
        rows = results.of(target)
        lines.append(
            [
                target.name,
                facts.get("torch", target.torch),
                facts.get("cuda", ""),
                facts.get("nccl", ""),
                what,
                facts.get("topics", "") if target.patched else "-",
                f"{len({(row.scenario, row.mode) for row in rows})} cells, {len(rows)} runs",
                column.date,
                facts.get("sources") or NOT_RECORDED,
                (facts.get("series") or NOT_RECORDED) if target.patched else "-",
            ]
        )
    head = [
        "column", "torch", "CUDA", "NCCL", "its backend builds", "patches", "run", "on", "sources", "series",
    ]  # fmt: skip
    return "## What was run\n\n" + _table(head, lines) + "\n" + _DIGESTS


def _defects(results: Results) -> str:
    lines = []
    for defect in DEFECTS:
        findings = [
            _finding(verdict(defect, results.of(target), target.implementation), target)
            for target in results.targets
        ]
        lines.append([defect.id, defect.text, *findings])
    head = ["id", "defect, under CleanUpOnly", *(target.name for target in results.targets)]
    return (
        "## Which defects each build has\n\n"
        "Counted from the runs below: cells that show the defect, of those that could.\n\n"
        + _table(head, lines)
    )


def _finding(found: Finding, target: Target) -> str:
    if found.verdict is Verdict.SHOWS:
        return f"**shows**, {len(found.shown)} of {found.told}"
    if found.verdict is Verdict.ENDED:
        return f"{'ended' if target.patched else 'not there'}, 0 of {found.told}"
    return str(found.verdict)


def _promises(results: Results) -> str:
    parts = []
    for target in (each for each in results.targets if each.patched):
        told = kept(results.of(target))
        good = sum(not what for what in told.values())
        parts.append(
            f"{target.name}{_of_series(results, target)}: **{good} of {len(told)} cells keep every promise.**"
            + (" Those that do not:" if good < len(told) else "")
            + "\n"
        )
        lines = [[f"`{name}`", mode, "; ".join(what)] for (name, mode), what in told.items() if what]
        parts.append(_table(["scenario", "mode", "what is broken"], lines) if lines else "")
    return _PROMISED + "\n" + "\n".join(parts) if parts else ""


def _of_series(results: Results, target: Target) -> str:
    series = next(each.facts.get("series") for each in results.columns if each.target == target)
    return f" (series {series})" if series else " (of a series that was not recorded)"


def _stock_modes(results: Results) -> str:
    parts = ["## Every other mode: as on stock\n"]
    for stock, patched in pairs(results.targets):
        found = compare(stock, patched, results.rows)
        parts.append(
            f"{found.patched} beside {found.stock}, in every mode but CleanUpOnly: **{found.same} of "
            f"{found.same + len(found.differences)} cells end alike** (the process's end, and for each step what it "
            "returned or raised)."
        )
        if found.lacking:
            parts.append(f"Not compared, as one of the two was not run: {', '.join(found.lacking)}.")
        if found.differences:
            lines = [[each.scenario, each.mode, each.stock, each.patched] for each in found.differences]
            parts.append("\n" + _table(["scenario", "mode", "stock", "patched"], lines))
        parts.append("")
    return "\n".join(parts) if len(parts) > 1 else ""


def _times(results: Results) -> str:
    timed = [
        scenario
        for scenario in SCENARIOS
        if scenario.program.endswith((":peer_lost", ":two_worlds", ":rebuilt"))
    ]
    lines = []
    for scenario in timed:
        cells = [_time(results.of(target), scenario) for target in results.targets]
        if any(cells):
            lines.append([f"`{scenario.id}`", *(cell or "-" for cell in cells)])
    head = ["scenario", *(target.name for target in results.targets)]
    return (
        "## From the fault to the unblocked caller, under CleanUpOnly\n\n"
        "Median / maximum over all runs in which the process lived, in seconds; *blocked* and *died* are counted "
        "beside.\n\n" + _table(head, lines)
    )


def _time(rows: list[Row], scenario: Scenario) -> str:
    mine = [
        seen
        for row in rows
        if row.scenario == scenario.id and row.mode in CLEAN_UP and not row.failure
        for seen in row.seen
        if seen.step("caller") is not None
    ]
    times = [seen.unblocked_ms for seen in mine if seen.end == ALIVE and seen.unblocked_ms is not None]
    parts = []
    if times:
        parts.append(f"{max(0.0, statistics.median(times)) / 1000:.2f} / {max(0, *times, 0) / 1000:.2f}")
    if blocked := sum(seen.end == ALIVE and seen.unblocked_ms is None for seen in mine):
        parts.append(f"*blocked* {blocked}")
    if died := sum(seen.end != ALIVE for seen in mine):
        parts.append(f"*died* {died}")
    return ", ".join(parts)


def _modes() -> str:
    lines = [
        [
            f"`{mode.id}`",
            mode.title,
            " ".join(f"`{name}={value}`" for name, value in mode.env.items()) or "-",
        ]
        for mode in MODES.values()
    ]
    return (
        "## The modes\n\n"
        + _table(["mode", "meaning", "environment"], lines)
        + "\nEverywhere `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=100`, unless the scenario is about it: torch sleeps four "
        "times as long before it aborts (60 s by default). And `TORCH_NCCL_TRACE_BUFFER_SIZE=0`, the default of 2.6: with "
        "more, the default of later ones, torch spends seconds of work on a stack trace before it aborts (two to ten "
        "here, by how busy the machine is).\n"
    )


def _group(results: Results, group: str) -> str:
    lines = []
    for scenario in (each for each in SCENARIOS if each.group == group):
        lines += _scenario(results, scenario)
    if not lines:
        return ""
    head = ["scenario", "mode", *(target.name for target in results.targets)]
    return f"### {group}\n\n" + _table(head, lines)


def _scenario(results: Results, scenario: Scenario) -> list[list[str]]:
    """Write a scenario's lines: modes in which every column says the same, times aside, are one line."""
    by_mode = {
        mode: [
            [words(row) for row in results.of(target) if (row.scenario, row.mode) == (scenario.id, mode)]
            for target in results.targets
        ]
        for mode in scenario.modes
    }
    merged: dict[tuple[frozenset[str], ...], list[str]] = {}
    for mode, columns in by_mode.items():
        if any(columns):
            merged.setdefault(tuple(frozenset(said.text for said in each) for each in columns), []).append(
                mode
            )
    lines = []
    for modes in merged.values():
        cells = [
            together([said for mode in modes for said in by_mode[mode][number]])
            for number in range(len(results.targets))
        ]
        lines.append(
            [f"`{scenario.id}`: {scenario.title}", ", ".join(modes), *(cell or "-" for cell in cells)]
        )
        if len(lines) > 1:
            lines[-1][0] = f"`{scenario.id}`"
    return lines
