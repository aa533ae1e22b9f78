"""``build``: what ``nox -s build-torch`` runs: an overlay build, or a full one with ``--mode full``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m8d_build.cli import full, overlay
from m8d_build.cli._common import say

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "build"
HELP = "build a patched wheel: the newest verified version for this Python, unless told otherwise"

BAD_ARGUMENTS = 2
ENV = "auto"  # what --env is unless given


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: those of ``overlay``, and the mode with what only ``full`` takes."""
    overlay.configure_parser(parser)
    parser.add_argument("--mode", choices=("overlay", "full"), default="overlay", help="default: overlay")
    group = parser.add_argument_group("with --mode full (`full --help` describes them)")
    group.add_argument("--env", choices=("auto", "conda", "mamba", "micromamba", "venv"), default=ENV)
    group.add_argument("--archs", metavar="LIST")
    again = group.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true")
    again.add_argument("--fresh", action="store_true")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Build; options of the other mode are refused.

    Raises:
        BuildError: as the mode's own command.
    """
    of_other = {
        "full": {"--wheel": args.wheel, "--allow-unverified": args.allow_unverified},
        "overlay": {
            "--env": args.env != ENV,
            "--archs": args.archs,
            "--resume": args.resume,
            "--fresh": args.fresh,
        },
    }
    if given := [option for option, value in of_other[args.mode].items() if value]:
        say(
            console,
            f"--mode {args.mode} excludes {', '.join(given)}: the other mode takes that. Leave it out.",
        )
        return BAD_ARGUMENTS
    if args.mode == "full":
        return full.execute(args, settings, console)
    return overlay.execute(args, settings, console)
