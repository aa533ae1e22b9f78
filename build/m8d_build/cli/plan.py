"""``plan``: the steps of a build, printed; nothing is run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m8d_build.cli import build

if TYPE_CHECKING:
    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "plan"
HELP = "print what a build would do"


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: those of ``build``."""
    build.configure_parser(parser)


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Print the plan.

    Raises:
        BuildError: the version has no target, or its series breaks a rule.
    """
    return build.execute(argparse.Namespace(**{**vars(args), "plan": True}), settings, console)
