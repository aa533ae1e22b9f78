"""``audit``: known vulnerabilities of what pyproject.toml asks for."""

from __future__ import annotations

import datetime as dt
import sys
from typing import TYPE_CHECKING

from m8d_build.errors import CheckFailed
from m8d_build.settings import REPO_ROOT
from m8d_build.testing.audit import audit

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "audit"
HELP = "Ask for known vulnerabilities of what pyproject.toml asks for (20 s); needs pip-audit: `nox -s lint`."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """It has no arguments."""
    del parser


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Print what is known; return 0, or CheckFailed's code where something is, and not accepted.

    Raises:
        CheckFailed: the requirements exclude each other, or pyproject.toml accepts something in a wrong form.
    """
    del args, settings
    project = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())
    verdict = audit(project, dt.datetime.now(dt.timezone.utc).date())
    for line in (*verdict.notes, *verdict.bad):
        console.print(f"audit: {line}", markup=False, soft_wrap=True)
    if not verdict.bad and not verdict.notes:
        console.print("audit: no known vulnerability", markup=False)
    return CheckFailed.exit_code if verdict.bad else 0
