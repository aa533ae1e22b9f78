"""Run the scenarios on real GPUs and write their page: ``python -m hardware --gpu NAME=PYTHON`` (`nox -s gpu`)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from bed.builds import parse_named
from bed.errors import BedError
from matrix.modes import CLEAN_UP
from matrix.promises import broken
from matrix.results import read as read_bed
from rich.console import Console

from hardware import risks
from hardware.costs import COSTS
from hardware.machine import NoGpu
from hardware.paper import PAPER
from hardware.placements import PLACEMENTS
from hardware.records import Records, Run, read, write
from hardware.report import page
from hardware.selection import HARDWARE
from hardware.session import Asked, GaveUp, run_build

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "parser"]

DOCS = Path(__file__).resolve().parents[3] / "docs"
NAME, BED = "hardware", "nccl-defects"
SCENARIOS = {scenario.id: scenario for scenario in HARDWARE}
SHORT = {
    "worlds": ("worlds:*", "groups beside*"),
    "cells": (),
    "risks": risks.names(),
    "costs": COSTS,
    "paper": (PAPER,),
}
"""The checks of each part of a short run; cells are run in its own part alone, once, under CleanUpOnly."""

DONE, NO_GPU, UNUSABLE, NOT_RUN, NOT_RIGHT, NOT_KEPT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    found = argparse.ArgumentParser("nox -s gpu --", description=__doc__)
    found.add_argument(
        "--gpu", action="append", default=[], metavar="NAME=PYTHON",
        help="a build of torch, by the name it gets on the page (stock-2.14.1); may be given several times",
    )  # fmt: skip
    found.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="only these of its backends")
    found.add_argument(
        "--placements", nargs="+", default=[], metavar="NAME", help=f"only these: {', '.join(PLACEMENTS)}"
    )
    found.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="only these scenarios (lost.*)"
    )
    found.add_argument("--modes", nargs="+", default=[], metavar="PATTERN", help="only these modes (aeh2*)")
    found.add_argument("--repeat", type=int, default=3, metavar="N", help="run each cell N times (3)")
    found.add_argument("--jobs", type=int, default=2, metavar="N", help="cells side by side (2)")
    found.add_argument(
        "--checks",
        nargs="*",
        default=["*"],
        metavar="PATTERN",
        help="only these checks ('worlds:*'; none: leave all out)",
    )
    found.add_argument(
        "--short", nargs="+", choices=sorted(SHORT), metavar="PART",
        help=f"what matters most, in minutes: {', '.join(sorted(SHORT))}",
    )  # fmt: skip
    found.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER", help="where page and JSON are")
    found.add_argument("--page-only", action="store_true", help="write the page from the JSON that is there")
    found.add_argument("--list", action="store_true", help="name the scenarios and end")
    return found


def main(
    argv: Sequence[str] | None = None, *, stand_in: Path | None = None, packages: tuple[Path, ...] = ()
) -> int:
    """Run the command.

    Args:
        argv: arguments.
        stand_in: the test bed's library, to test this very code without a GPU.
        packages: folders with what ranks need beyond torch (numpy), where the build has it not.

    Returns:
        0; 1: no GPU; 2: wrong arguments, or a build or machine that cannot be used; 3: runs that came to nothing; 4:
        values or worlds that are not right; 5: a patched build that breaks a promise; 130: interrupted (what was run
        is kept).
    """
    args = parser().parse_args(argv)
    console = Console(soft_wrap=True, highlight=False)
    if args.list:
        for scenario in HARDWARE:
            console.print(f"{scenario.id}: {scenario.title} [{' '.join(scenario.modes)}]", markup=False)
        return DONE
    today = datetime.now(timezone.utc).date().isoformat()
    path = args.docs / f"{NAME}.json"
    runs: list[Run] = []
    code = DONE
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was run is kept then too
    try:
        known = read(path, today=today)
        if not args.page_only:
            _run(args, stand_in, packages, today, runs, console)
    except (BedError, ValueError) as exc:
        console.print(str(exc), markup=False, style="red")
        code = NO_GPU if isinstance(exc, NoGpu) else NOT_RUN if isinstance(exc, GaveUp) else UNUSABLE
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    if (args.page_only and code == DONE) or runs:
        _write(args.docs, known.merged(runs), console)
    return code or _judge(runs, console)


def _run(
    args: argparse.Namespace,
    stand_in: Path | None,
    packages: tuple[Path, ...],
    today: str,
    runs: list[Run],
    console: Console,
) -> None:
    named = parse_named(args.gpu, option="--gpu")
    if not named:
        raise BedError(
            "there is no build to run",
            rule="each is named: --gpu NAME=PYTHON",
            next_step="Name one, or run `nox -s gpu` without options, which installs one",
        )
    for option in ("repeat", "jobs"):
        if getattr(args, option) < 1:
            raise BedError(f"--{option} {getattr(args, option)}", rule="it is 1 or more")
    asked = _asked(args, stand_in, packages)
    with tempfile.TemporaryDirectory(prefix="m8d-gpu-") as folder:
        for name, python in named.items():
            run_build(
                name, python, asked, scratch=Path(folder), today=today, keep=runs.append,
                say=lambda text: console.print(text, markup=False),
            )  # fmt: skip


def _asked(args: argparse.Namespace, stand_in: Path | None, packages: tuple[Path, ...]) -> Asked:
    if args.short:
        cells = "cells" in args.short
        return Asked(
            ["*"] if cells else ["-"], ["aeh2"], args.placements, args.backends, 1, args.jobs,
            checks=[name for part in args.short for name in SHORT[part]],
            said=[f"--short {' '.join(args.short)}"], library=stand_in, packages=packages,
        )  # fmt: skip
    said = [
        f"--{option} {' '.join(given)}".strip()
        for option, given, default in (
            ("only", args.only, []), ("modes", args.modes, []), ("checks", args.checks, ["*"])
        )
        if given != default
    ]  # fmt: skip
    return Asked(
        args.only, args.modes, args.placements, args.backends, args.repeat, args.jobs,
        checks=args.checks, said=said, library=stand_in, packages=packages,
    )  # fmt: skip


def _write(docs: Path, records: Records, console: Console) -> None:
    docs.mkdir(parents=True, exist_ok=True)
    write(docs / f"{NAME}.json", records)
    bed = read_bed(docs / f"{BED}.json")
    (docs / f"{NAME}.md").write_text(page(records, bed), encoding="utf-8")
    console.print(f"written: {docs / NAME}.md and .json", markup=False)


def _judge(runs: Sequence[Run], console: Console) -> int:
    """Say what is wrong with what was run now."""
    code = DONE
    if failed := [row for run in runs for row in run.rows if row.failure]:
        console.print(f"{len(failed)} runs came to nothing", style="red")
        code = NOT_RUN
    if wrong := [check for run in runs for check in run.checks if not check.right]:
        console.print(f"not right: {'; '.join(check.name for check in wrong)}", markup=False, style="red")
        code = NOT_RIGHT
    for run in (each for each in runs if each.column.target.patched):
        for row in run.rows:
            if row.mode in CLEAN_UP and not row.failure and (what := broken(row, SCENARIOS[row.scenario])):
                console.print(f"{row.scenario} in {row.mode}: {'; '.join(what)}", markup=False, style="red")
                code = NOT_KEPT
    return code


if __name__ == "__main__":
    sys.exit(main())
