"""``m8d-run make-authority``: makes what the launchers of several nodes share. It loads no torch."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld.cli.console import complain, say
from multiworld.errors import MultiworldError
from multiworld.run.secure import authority_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["make_authority"]

_WRONG = 2
_DAYS = 365.0
_MOST_DAYS = 36500.0


def make_authority(argv: Sequence[str]) -> int:
    """Run ``m8d-run make-authority``; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="m8d-run make-authority",
        description="Make an authority for secure runs on several nodes: m8d-run --authority DIR signs the "
        "certificates of its processes with it. Have DIR on every node, as a secret: who can read its "
        f"{authority_folder.KEY} can join the runs.",
        epilog=f"Exit code: 0; {_WRONG}: it could not be made, and the line says why.",
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        help=f"gets {authority_folder.CERTIFICATE} and {authority_folder.KEY}; it is made unless it is there",
    )
    parser.add_argument(
        "--days",
        type=float,
        default=_DAYS,
        help=f"for which it is valid, and all that it signs at most (default: {_DAYS:g})",
    )
    args = parser.parse_args(argv)
    if not (math.isfinite(args.days) and 0 < args.days <= _MOST_DAYS):
        parser.error(f"--days {args.days:g}: it is above 0 and at most {_MOST_DAYS:g}")
    try:
        authority = authority_folder.make(Path(args.folder), days=args.days)
    except MultiworldError as error:
        complain(f"m8d-run make-authority: {error}")
        return _WRONG
    until = time.strftime("%Y-%m-%d", time.gmtime(authority.until))
    say(f"{args.folder}: an authority, valid until {until}. Have it on every node, readable by the run's")
    say(f"user alone, and give m8d-run --authority {args.folder} there.")
    return 0
