"""Fill the defect matrix and write its page: ``python -m matrix --bed NAME=PYTHON ...`` (`nox -s matrix` does it)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from bed.build import build as compile_bed
from bed.builds import Build, ask, parse_named
from bed.errors import BedError
from bed.ranks import Launcher
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from m8d_build.files.digests import patches_digest, sources_digest
from m8d_build.progress import Progress
from m8d_build.settings import Settings
from matrix.catalogue import SCENARIOS
from matrix.cells import Cell, cells, targets
from matrix.compare import compare, pairs
from matrix.finding import found
from matrix.page import page
from matrix.promises import kept
from matrix.results import Column, Results, read, write
from matrix.runner import run_cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matrix.outcome import Row

DOCS = Path(__file__).resolve().parents[3] / "docs"
NAME = "nccl-defects"
ORDER = [(scenario.id, mode) for scenario in SCENARIOS for mode in scenario.modes]
WRONG, NOT_RUN, NOT_ALIKE, NOT_KEPT, INTERRUPTED = 2, 3, 4, 5, 130


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    found = argparse.ArgumentParser("python -m matrix", description=__doc__)
    found.add_argument(
        "--bed",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="a build of torch, by the name of its columns (stock-2.14.1); may be given several times. Without it: the "
        "official 2.6.0, 2.14.1 and 2.15.0 (6 GB each, kept in the cache), and the patched wheels in out/",
    )
    found.add_argument("--builds", nargs="+", default=[], metavar="NAME", help="only these of the --bed")
    found.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="only these of theirs")
    found.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="only these scenarios (lost.*)"
    )
    found.add_argument("--modes", nargs="+", default=[], metavar="PATTERN", help="only these modes (aeh2*)")
    found.add_argument("--repeat", type=int, default=1, metavar="N", help="run each cell N times (1)")
    found.add_argument(
        "--jobs", type=int, default=4, metavar="N", help="cells side by side (4: most of a cell is waiting)"
    )
    found.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER", help="where page and JSON are")
    found.add_argument("--page-only", action="store_true", help="write the page from the JSON that is there")
    found.add_argument("--list", action="store_true", help="name the scenarios and end")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 2: wrong arguments, or a build cannot be used; 3: cells that came to nothing; 4: a patched build ends
        differently from the stock one where it must not; 5: it breaks a promise; 130: interrupted (what was run
        is kept).
    """
    args = parser().parse_args(argv)
    console = Console(soft_wrap=True)
    if args.list:
        for scenario in SCENARIOS:
            console.print(f"{scenario.id}: {scenario.title} [{' '.join(scenario.modes)}]", markup=False)
        return 0
    path = args.docs / f"{NAME}.json"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was run is kept then too
    try:
        known = read(path)
        if args.page_only:
            return _conclude(args.docs, known.merged((), (), order=ORDER), (), console)
        return _fill(args, known, console)
    except (BedError, ValueError) as exc:
        console.print(str(exc), markup=False, style="red")
        return WRONG


def _fill(args: argparse.Namespace, known: Results, console: Console) -> int:
    """Run what was asked for, and keep what came of it even if it was cut short."""
    rows: list[Row] = []
    columns: list[Column] = []
    interrupted = False
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="m8d-matrix-")))
        launchers: dict[str, Launcher] = {}
        try:
            for name, python in _builds(args, stack, console).items():
                library = compile_bed(python, say=console.print)
                launchers[name] = stack.enter_context(Launcher(python, library, workdir=scratch / name))
                columns += _columns(ask(name, launchers[name]), args.backends)
            asked = _asked(args, columns, known)
            console.print(f"{len(asked)} runs, {args.jobs} at a time")
            _run(launchers, asked, args.jobs, scratch, rows, console)
        except KeyboardInterrupt:
            interrupted = True
    code = _conclude(args.docs, known.merged(columns, rows, order=ORDER), rows, console)
    return INTERRUPTED if interrupted else code


def _builds(args: argparse.Namespace, stack: ExitStack, console: Console) -> dict[str, Path]:
    named = parse_named(args.bed)
    if not named:
        report = Progress((), console)
        named = stack.enter_context(found(Settings.load(), report))
    wanted = {name: python for name, python in named.items() if not args.builds or name in args.builds}
    if not wanted:
        raise BedError(
            f"there is no build {' or '.join(args.builds)}",
            rule=f"there are {', '.join(named)}",
            next_step="Correct --builds, or name the build: --bed NAME=PYTHON",
        )
    return wanted


def _columns(build: Build, backends: Sequence[str]) -> list[Column]:
    facts = {
        "torch": build.torch, "cuda": build.cuda, "nccl": build.nccl, "topics": ", ".join(build.topics),
        "sources": sources_digest(NAME), "series": patches_digest(build.patches),
    }  # fmt: skip
    every = targets(
        build.name,
        build.torch,
        patched=build.patched,
        backends=build.backends,
        default=build.nccl_default_is,
    )
    today = datetime.now(timezone.utc).date().isoformat()
    return [Column(each, facts, today) for each in every if not backends or each.backend in backends]


def _asked(args: argparse.Namespace, columns: Sequence[Column], known: Results) -> list[Cell]:
    """A build whose twin was run earlier is run in all modes too: the two are compared."""
    now = [column.target for column in columns]
    every = list(dict.fromkeys([*now, *known.targets]))
    found = cells(SCENARIOS, every, only=args.only, modes=args.modes, repeat=args.repeat)
    if mine := [cell for cell in found if cell.target in now]:
        return mine
    raise BedError(
        f"nothing is to be run: --only {' '.join(args.only) or '*'} --modes {' '.join(args.modes) or '*'}",
        rule="a pattern fits the id of a scenario (lost.*) or of a mode (aeh2*), and N is 1 or more",
        next_step="Look at --list",
    )


def _run(
    launchers: dict[str, Launcher],
    asked: Sequence[Cell],
    jobs: int,
    scratch: Path,
    rows: list[Row],
    console: Console,
) -> None:
    bar = Bar(
        TextColumn("{task.fields[last]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    began = time.monotonic()
    with bar:
        task = bar.add_task("matrix", total=len(asked), last="")

        def took(cell: Cell, row: Row) -> None:
            rows.append(row)
            bar.update(task, advance=1, last=str(cell))
            if row.failure:
                console.print(f"{cell}: {row.failure}", markup=False, style="red")
            elif not console.is_terminal and len(rows) % 25 == 0:
                console.print(f"{len(rows)} of {len(asked)}, {time.monotonic() - began:.0f} s")

        for name, launcher in launchers.items():
            mine = [cell for cell in asked if cell.target.build == name]
            run_cells(launcher, mine, scratch=scratch, jobs=jobs, each=took)


def _conclude(docs: Path, results: Results, rows: Sequence[Row], console: Console) -> int:
    """Write both files, and judge."""
    docs.mkdir(parents=True, exist_ok=True)
    write(docs / f"{NAME}.json", results)
    (docs / f"{NAME}.md").write_text(page(results), encoding="utf-8")
    console.print(f"written: {docs / NAME}.md and .json", markup=False)
    code = 0
    if failed := [row for row in rows if row.failure]:
        console.print(f"{len(failed)} of {len(rows)} runs came to nothing", style="red")
        code = NOT_RUN
    for target in (each for each in results.targets if each.patched):
        told = kept(results.of(target))
        bad = {cell: what for cell, what in told.items() if what}
        for (name, mode), what in bad.items():
            console.print(f"{target.name} {name} in {mode}: {'; '.join(what)}", markup=False, style="red")
        code = NOT_KEPT if bad else code
        console.print(
            f"{target.name}: {len(told) - len(bad)} of {len(told)} cells keep every promise", markup=False
        )
    for stock, patched in pairs(results.targets):
        found = compare(stock, patched, results.rows)
        for each in found.differences:
            console.print(
                f"{each.scenario} in {each.mode} does not end as on stock:\n  stock:   {each.stock}\n"
                f"  patched: {each.patched}",
                markup=False,
                style="red",
            )
            code = NOT_ALIKE
        console.print(
            f"{found.patched}: {found.same} cells outside CleanUpOnly end as on {found.stock}", markup=False
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
