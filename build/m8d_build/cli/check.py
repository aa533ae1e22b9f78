"""``check``: install a patched wheel in a fresh environment and show that it behaves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from m8d_build.check import check_wheel
from m8d_build.check.run import EXPECTED_SECONDS, STOCK_AUTO, STOCK_NONE
from m8d_build.cli import print_json
from m8d_build.cli._common import existing_wheel, newest_wheel
from m8d_build.errors import OutputUnwritable
from m8d_build.porting.report import add_behaviour
from m8d_build.progress import Progress, Silent

if TYPE_CHECKING:
    import argparse

    from m8d_build.check.report import Report
    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "check"
HELP = "Install a patched wheel in a fresh environment and show how it behaves, beside the stock one."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("wheel", nargs="?", type=Path, help="the patched wheel (default: the newest in out/)")
    parser.add_argument(
        "--stock",
        default=STOCK_AUTO,
        metavar="PYTHON|auto|none",
        help="what to compare with: a Python that has the official wheel; auto: an environment kept in the "
        "cache; "
        "none: do not compare (default: auto)",
    )
    parser.add_argument(
        "--official", type=Path, metavar="WHEEL", help="the official wheel, instead of downloading it"
    )
    parser.add_argument("--keep", action="store_true", help="leave the wheel's environment in the cache")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder with the wheel and the logs (default: out/)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Check a wheel and print every outcome.

    Raises:
        BehaviourFailed: an outcome is not the expected one.
        BuildError: another of the toolchain's errors; see ``check_wheel``.
    """
    wheel = existing_wheel(args.wheel) if args.wheel else newest_wheel(settings.out)
    log = _new_log(settings.out / "logs", wheel)
    report = check_wheel(
        wheel,
        settings,
        Silent() if args.json else Progress(EXPECTED_SECONDS, console),
        log=log,
        stock=args.stock,
        official=args.official,
        keep=args.keep,
    )
    if args.json:
        print_json(console, report.as_json())
    else:
        console.print(report.as_table())
        stock = (
            f"compared with {report.stock}"
            if report.stock
            else f"not compared with stock (--stock {STOCK_NONE})"
        )
        console.print(
            f"{report.wheel.name}: torch {report.version}, {', '.join(report.topics)}; {stock}",
            markup=False,
            soft_wrap=True,
        )
    _add_to_port(wheel, report, console, as_json=args.json)
    report.require_ok(log)
    if not args.json:
        console.print(
            f"{len(report.results)} checks as expected, {report.seconds:.0f} s. Log: {log}",
            markup=False,
            soft_wrap=True,
        )
        console.print(
            "Not tested here, as it needs NCCL: D1, D2, D6 and a slow ncclCommAbort. `nox -s testbed` does.",
            markup=False,
            soft_wrap=True,
        )
    return 0


def _add_to_port(wheel: Path, report: Report, console: Console, *, as_json: bool) -> None:
    """Add what was found to the report on the port, if there is one, and say so.

    The outcome of the checks is what the command answers: a report that cannot be written is only noted.
    """
    try:
        added = add_behaviour(wheel, report.as_json())
    except OutputUnwritable as exc:
        # With --json the output is JSON alone.
        told = Console(stderr=True, highlight=False) if as_json else console
        told.print(f"NOT added to the report on the port: {exc}", markup=False, soft_wrap=True)
        return
    if added is not None and not as_json:
        console.print(f"Added to the report on the port: {added}", markup=False, soft_wrap=True)


def _new_log(folder: Path, wheel: Path) -> Path:
    log = folder / f"check-{wheel.stem}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
    except OSError as exc:
        raise OutputUnwritable(
            f"{log} cannot be written: {exc.strerror}",
            rule="everything the check runs is logged there",
            next_step="Name another folder with --out",
        ) from exc
    return log
