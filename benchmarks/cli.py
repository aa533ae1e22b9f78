"""The command line: choice of parts, form, place of the record; exit statuses."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.figures import records
from benchmarks.figures.compare import compare
from benchmarks.figures.table import show_comparison, show_goals
from benchmarks.parts import BY_NAME, NOT_QUICK, PARTS, load
from benchmarks.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.figures.records import Record
    from benchmarks.measuring.part import Part

MISSED, FAILED = 1, 2
WIDTH = 140
"""Columns where the output is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts, or compare two records; the exit status.

    0: it ran. 1: with --check, a goal was missed. 2: a part failed, or the command line is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what multiworld costs beside stock torch.distributed.",
        epilog="Each part also runs alone, with options of its own: python -m benchmarks.messages --help",
    )
    _common(parser)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; "
        f"default: all but {', '.join(sorted(BY_NAME))}, without --full not {', '.join(sorted(NOT_QUICK))}"
    )  # fmt: skip
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLDER", "NEWER"), help="of two records; nothing is run"
    )
    args = parser.parse_args(argv)
    console = _console()
    if args.compare:
        return _compare_files(console, *args.compare)
    names = args.only or [
        name for name in PARTS if name not in BY_NAME and (args.full or name not in NOT_QUICK)
    ]
    loaders: dict[str, Callable[[], Part]] = {name: partial(load, name) for name in PARTS if name in names}
    return _run(console, args, argv, loaders, alone=False)


def run_alone(part: Part, argv: Sequence[str] | None = None) -> int:
    """Run one part with its own options; the exit status is that of `main`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{part.name}", description=part.description)
    _common(parser)
    if part.add_options is not None:
        part.add_options(parser)
    return _run(_console(), parser.parse_args(argv), argv, {part.name: lambda: part}, alone=True)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="the long form: every size, count and form")
    parser.add_argument("--out", type=Path, default=records.OUT, metavar="DIR", help="where the record goes")
    parser.add_argument("--keep", action="store_true", help="keep the record in benchmarks/results/ as well")
    parser.add_argument("--check", action="store_true", help="end with 1 if a goal is missed")
    parser.add_argument(
        "--page", action="store_true", help="if no part fails, keep it, and write docs/benchmarks/"
    )


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def _run(
    console: Console,
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    loaders: dict[str, Callable[[], Part]],
    *,
    alone: bool,
) -> int:
    given = _for_the_record(sys.argv[1:] if argv is None else argv)
    runner = Runner(console, _status(console), full=args.full, options=args if alone else None)
    record = runner.run(loaders, given)
    show_goals(console, record.figures)
    compare_with_last(console, record, args.out)
    paths = [records.save(record, args.out)]
    page = args.page and not runner.failed
    if args.keep or page:
        paths.append(records.save(record, records.KEPT))
    if page:
        from benchmarks.page.write import write  # noqa: PLC0415  (it draws with matplotlib, which only this needs)

        paths.append(write(sorted(records.KEPT.glob("*.json"))))
    console.print()
    for path in paths:
        console.print(path, soft_wrap=True)
    if runner.failed:
        if args.page:
            console.print(
                "the page is as it was, as a part failed; --keep, then python -m benchmarks.page write it"
            )
        return FAILED
    return MISSED if args.check and any(figure.met is False for figure in record.figures) else 0


def _for_the_record(given: Sequence[str]) -> tuple[str, ...]:
    """The options that decide what was measured: where the record goes does not count."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--keep", "--check", "--page"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--out")
    return tuple(parser.parse_known_args(given)[1])


def compare_with_last(console: Console, record: Record, *folders: Path) -> None:
    """Show what has changed since the last record of the same parts, form and kind of machine."""
    older, wrong = records.stored(records.KEPT, records.OUT, *folders)
    for each in wrong:
        console.print(f"not compared with {each}", soft_wrap=True)
    before = records.previous(record, older)
    for when in sorted({each.when for each in before.values()}):
        parts = [name for name in record.parts if name in before and before[name].when == when]
        old = before[parts[0]]
        figures = [[figure for figure in each.figures if figure.part in parts] for each in (old, record)]
        show_comparison(console, old, record, compare(*figures), ", ".join(parts))


def _compare_files(console: Console, older: Path, newer: Path) -> int:
    try:
        before, after = records.load(older), records.load(newer)
    except (records.BadRecord, OSError) as error:
        console.print(str(error), soft_wrap=True)
        return FAILED
    for part in after.parts:
        if part in before.parts and before.parts[part].form != after.parts[part].form:
            console.print(f"{part}: {before.parts[part].form}, then {after.parts[part].form}")
    show_comparison(console, before, after, compare(before.figures, after.figures), "all parts")
    return 0


def _status(console: Console) -> Console:
    return console if console.is_terminal else Console(stderr=True)
