"""``battery``: the contract tests on several torch versions, and the page that says how it went."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version
from rich.table import Table

from m8d_build.cli import print_json
from m8d_build.cli._common import add_test_options, positive, say
from m8d_build.errors import BehaviourFailed, OutputUnwritable
from m8d_build.progress import Progress, Silent
from m8d_build.testing.page import put_into, render
from m8d_build.testing.results import FAILED, PASSED, SKIPPED, Outcome
from m8d_build.testing.versions import (
    LIMIT,
    VERSIONS,
    Asked,
    earlier,
    folder_of,
    resolve,
    run_battery,
    sources_digest,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "battery"
HELP = "Run the contract tests on several torch versions, one after the other."
SHOWN = 10  # failed tests of a version, on the terminal
BAD_ARGUMENTS = 2
# Seconds on two cores with the environments in the cache.
STEPS = (("environment", 5.0), ("tests", 300.0))


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--torch",
        action="extend",
        nargs="+",
        type=_version,
        metavar="VERSION",
        help=f"which; 2.15 means the newest 2.15.x (default: {' '.join(VERSIONS)})",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        type=_named_python,
        metavar="VERSION=PATH",
        help="a Python that has this torch, instead of downloading it; it is not changed. Without --torch only these are run",
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the results into this page (docs/compatibility.md)"
    )
    add_test_options(parser)
    parser.add_argument(
        "--limit",
        type=positive,
        default=int(LIMIT),
        metavar="SECONDS",
        help=f"one version's tests may take (default: {LIMIT:.0f})",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="logs and junit files (default: out/)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Run the battery, print what came of it, and write the page.

    Raises:
        BehaviourFailed: a test failed, or a version was not run.
        OutputUnwritable: the output folder or the page cannot be written, or the page has no place for results.
    """
    if args.write and args.match:
        say(
            console, "--write and -k exclude each other: a page about some of the tests would claim too much."
        )
        return BAD_ARGUMENTS
    pythons = dict(args.python)
    versions = resolve(args.torch or [*pythons] or VERSIONS, [*pythons])
    if unused := [version for version in pythons if version not in versions]:
        say(console, f"--python names torch {', '.join(unused)}, which --torch does not ask for.")
        return BAD_ARGUMENTS
    page = _Page(args.write) if args.write else None
    asked = Asked(versions, pythons, match=args.match, limit=float(args.limit), keep=args.keep)
    expected = [(f"torch {version}: {name}", seconds) for version in versions for name, seconds in STEPS]
    today = datetime.now(timezone.utc).date().isoformat()
    outcomes = run_battery(
        asked, settings, Silent() if args.json else Progress(expected, console), date=today
    )
    if args.json:
        print_json(console, [_as_json(outcome) for outcome in outcomes])
    else:
        _show(console, outcomes, settings)
    if page is not None:
        page.write(_columns(outcomes, asked, settings, today, resolve(VERSIONS, versions)))
        if not args.json:
            say(console, f"written: {args.write}")
    if bad := [outcome for outcome in outcomes if not outcome.ok]:
        raise BehaviourFailed(
            "; ".join(f"torch {outcome.torch}: {_short(outcome)}" for outcome in bad),
            rule="every test of the battery passes or is skipped for a reason, on every version",
            next_step=f"Look at the logs in {folder_of(settings)}",
        )
    return 0


class _Page:
    """The page to write, read before the tests run: a wrong path should not cost an hour."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._before = path.read_text(encoding="utf-8") if path.exists() else None
            put_into(self._before, "")
        except (OSError, ValueError) as exc:
            raise self._error(exc) from exc

    def write(self, outcomes: Sequence[Outcome]) -> None:
        machine = f"{platform.system()} {platform.machine()}, CPU only (gloo)"
        text = put_into(self._before, render(outcomes, machine=machine))
        beside = self._path.with_name(f".{self._path.name}.part")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(self._path)
        except OSError as exc:
            raise self._error(exc) from exc

    def _error(self, exc: Exception) -> OutputUnwritable:
        return OutputUnwritable(
            f"{self._path}: {exc}",
            rule="the results go into a page that can be written",
            next_step="Correct --write; a page that does not exist yet is made",
        )


def _columns(
    outcomes: Sequence[Outcome], asked: Asked, settings: Settings, today: str, listed: Sequence[str]
) -> list[Outcome]:
    """Return a column for each version run now or in the list, the others' from earlier runs of the same sources."""
    sources = sources_digest(asked.tests)
    known = {Version(o.torch).public: o for o in (*earlier(settings, sources).values(), *outcomes)}
    versions = sorted({*listed, *(Version(outcome.torch).public for outcome in outcomes)}, key=Version)
    return [known.get(v) or Outcome(v, today, sources, trouble="not run: not asked for") for v in versions]


def _show(console: Console, outcomes: Sequence[Outcome], settings: Settings) -> None:
    table = Table("torch", "build", "Python", PASSED, FAILED, SKIPPED, "seconds", box=None)
    for outcome in outcomes:
        counts = [str(outcome.count(verdict)) for verdict in (PASSED, FAILED, SKIPPED)]
        table.add_row(outcome.torch, outcome.build, outcome.python, *counts, f"{outcome.seconds:.0f}")
    console.print(table)
    for outcome in outcomes:
        failed = [case for case in outcome.cases if case.verdict == FAILED]
        say(console, *(f"torch {outcome.torch}: {c.file}.py::{c.name}: {c.reason}" for c in failed[:SHOWN]))
        if len(failed) > SHOWN:
            say(console, f"torch {outcome.torch}: and {len(failed) - SHOWN} more")
        if outcome.trouble:
            say(console, f"torch {outcome.torch}: {outcome.trouble}")
    say(console, f"Logs and junit files: {folder_of(settings)}")


def _short(outcome: Outcome) -> str:
    failed = outcome.count(FAILED)
    return outcome.trouble.partition(":")[0] or f"{failed} test{'s' if failed > 1 else ''} failed"


def _as_json(outcome: Outcome) -> dict[str, object]:
    return {
        "torch": outcome.torch,
        "build": outcome.build,
        "python": outcome.python,
        "ok": outcome.ok,
        "trouble": outcome.trouble,
        "seconds": round(outcome.seconds, 1),
        **{verdict: outcome.count(verdict) for verdict in (PASSED, FAILED, SKIPPED)},
        "reasons": [
            {"test": f"{case.file}.py::{case.name}", "verdict": case.verdict, "reason": case.reason}
            for case in outcome.cases
            if case.reason
        ],
    }


def _version(text: str) -> str:
    """Parse a version (for argparse).

    Raises:
        ValueError: it is none.
    """
    try:
        parsed = Version(text)
    except InvalidVersion as exc:
        raise ValueError(text) from exc
    if len(parsed.release) < 2:
        raise ValueError(text)
    return text


def _named_python(text: str) -> tuple[str, Path]:
    """Parse VERSION=PATH (for argparse).

    Raises:
        ValueError: it is something else.
    """
    version, _, path = text.partition("=")
    if not path or len(Version(_version(version)).release) < 3:
        raise ValueError(text)
    return version, Path(path)
