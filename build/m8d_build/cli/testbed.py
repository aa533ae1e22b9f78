"""``testbed``: the tests of ProcessGroupNCCL, on the patched wheel last built and an official one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.cli import print_json
from m8d_build.cli._common import add_test_options, existing_wheel, newest_wheel, positive, say
from m8d_build.progress import Progress, Silent
from m8d_build.testing.testbed import (
    LIMIT,
    STEP_PATCHED,
    STEP_TESTS,
    VERSIONS,
    Asked,
    run_testbed,
    step_stock,
)

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "testbed"
HELP = "Run the tests of the NCCL test bed on the patched wheel last built and on an official one; no GPU is needed."
BAD_ARGUMENTS = 2


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--bed",
        action="append",
        default=[],
        type=_named_python,
        metavar="NAME=PYTHON",
        help="a Python with a CUDA build of torch, used as it is; with this, nothing is downloaded or installed",
    )
    parser.add_argument("--wheel", type=Path, help="the patched wheel (default: the newest in out/)")
    parser.add_argument("--no-wheel", action="store_true", help="only official builds")
    parser.add_argument(
        "--torch",
        nargs="*",
        default=list(VERSIONS),
        metavar="VERSION",
        help=f"official builds (default: {' '.join(VERSIONS)})",
    )
    add_test_options(parser)
    parser.add_argument(
        "--limit",
        type=positive,
        default=int(LIMIT),
        metavar="SECONDS",
        help=f"the tests of a build may take (default: {LIMIT:.0f})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder with the wheel, the log and the junit file (default: out/)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Run the tests and say what came of it.

    Raises:
        BehaviourFailed: a test failed.
        BuildError: a build cannot be had; see ``run_testbed``.
    """
    if args.wheel and (args.no_wheel or args.bed):
        say(console, "--wheel excludes --no-wheel and --bed: a named build is used as it is.")
        return BAD_ARGUMENTS
    if args.no_wheel and not args.torch and not args.bed:
        say(console, "--no-wheel with an empty --torch leaves no build to test.")
        return BAD_ARGUMENTS
    wheel = None
    if not args.bed and not args.no_wheel:
        wheel = existing_wheel(args.wheel) if args.wheel else newest_wheel(settings.out)
    asked = Asked(
        dict(args.bed), wheel, tuple(args.torch), match=args.match, limit=float(args.limit), keep=args.keep
    )
    # Seconds on two cores with the environments in the cache.
    expected = [(STEP_PATCHED, 20.0)] if wheel else []
    expected += [(step_stock(version), 5.0) for version in asked.versions if not asked.beds]
    expected.append((STEP_TESTS, 600.0))
    ran = run_testbed(asked, settings, Silent() if args.json else Progress(expected, console))
    if args.json:
        print_json(
            console,
            {
                "builds": ran.builds,
                "summary": ran.summary(),
                "seconds": round(ran.seconds, 1),
                "log": str(ran.log),
            },
        )
    else:
        say(console, f"{', '.join(ran.builds)}: {ran.summary()}, {ran.seconds:.0f} s. Log: {ran.log}")
    return 0


def _named_python(text: str) -> tuple[str, Path]:
    """Parse NAME=PYTHON (for argparse); the tests look at it more closely.

    Raises:
        ValueError: it is something else.
    """
    name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError(text)
    return name, Path(path).expanduser().absolute()
