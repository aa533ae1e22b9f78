"""Shared by commands: choice of target and Python, announcement of a built wheel."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from m8d_build.errors import WheelUnreachable
from m8d_build.targets import load_targets

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from m8d_build.settings import Settings
    from m8d_build.targets import Target

__all__ = [
    "add_test_options",
    "announce",
    "choose_target",
    "existing_wheel",
    "newest_wheel",
    "positive",
    "python_tag",
    "say",
]


def python_tag(asked: str | None) -> str:
    """Return a Python tag ("cp311") for "3.11", "cp311", or, for None, the Python that runs this."""
    if not asked:
        return f"cp{sys.version_info.major}{sys.version_info.minor}"
    return asked if asked.startswith("cp") else "cp" + "".join(asked.split(".")[:2])


def choose_target(args: argparse.Namespace, settings: Settings, python: str) -> Target:
    """Return the target ``--torch`` names, or the newest verified one for this Python.

    Raises:
        UnknownVersion: there is none.
    """
    targets = load_targets(settings.patches)
    return targets.get(args.torch) if args.torch else targets.newest_verified(python)


def add_test_options(parser: argparse.ArgumentParser) -> None:
    """Add what commands take that run pytest on builds of torch from the cache."""
    parser.add_argument(
        "-k", dest="match", default="", metavar="EXPR", help="only tests that match (pytest's -k)"
    )
    parser.add_argument(
        "--no-keep",
        dest="keep",
        action="store_false",
        help="remove the wheels and environments this run adds to the cache (about 6 GB for each version), "
        "unless another run uses the cache",
    )


def positive(text: str) -> int:
    """Parse a whole number from 1 up (for argparse).

    Raises:
        ValueError: it is none.
    """
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def existing_wheel(path: Path) -> Path:
    """Return a wheel's path if there is a file.

    Raises:
        WheelUnreachable: there is none.
    """
    if not path.is_file():
        raise WheelUnreachable(
            f"{path} is not there",
            rule="a wheel given by path must be a file",
            next_step="Correct the path, or build one: nox -s build-torch",
        )
    return path


def newest_wheel(out: Path) -> Path:
    """Return the patched wheel last built.

    Raises:
        WheelUnreachable: there is none.
    """
    wheels = sorted(out.glob("torch-*.m8d*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise WheelUnreachable(
            f"{out} has no patched wheel",
            rule="without a WHEEL argument the newest in the output folder is taken",
            next_step="Build one (nox -s build-torch), or name one",
        )
    return wheels[-1]


def say(console: Console, *lines: str) -> None:
    """Print lines as they are: no markup, no wrapping."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def announce(console: Console, wheel: Path, sha256: str, topics: Sequence[str]) -> None:
    """Say what was built and how to install it."""
    say(
        console,
        "",
        f"wheel:    {wheel}",
        f"size:     {wheel.stat().st_size / 1e6:.0f} MB",
        f"sha256:   {sha256}",
        f"topics:   {', '.join(topics)}",
        f"install:  python -m pip install {shlex.quote(str(wheel))}",
    )
