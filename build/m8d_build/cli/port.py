"""``port``: carry a series to another version's sources."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.series.port import port_series
from m8d_build.series.read import load_series
from m8d_build.targets import load_targets

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "port"
HELP = "Carry a series to another PyTorch version: every hunk in place or moved, or every conflict shown."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--from", dest="origin", required=True, metavar="VERSION", help="whose series")
    parser.add_argument("--to", required=True, metavar="VERSION", help="the version it is carried to")
    parser.add_argument("--source", type=Path, required=True, metavar="TREE", help="that version's sources")
    parser.add_argument(
        "--from-source",
        type=Path,
        metavar="TREE",
        help="the sources it was made for, to tell equal places apart",
    )
    parser.add_argument("--drop", action="append", default=[], metavar="TOPIC", help="leave this patch out")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, write nothing")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Port the series and say where its hunks went.

    Raises:
        BuildError: see ``m8d_build.series.port.port_series``.
    """
    target = load_targets(settings.patches).get(args.origin)
    series = load_series(settings.patches, target.version)
    ported = port_series(
        settings.patches,
        series,
        args.to,
        args.source,
        from_tree=args.from_source,
        drop=args.drop,
        dry_run=args.dry_run,
    )
    verb = "would write" if args.dry_run else "wrote"
    console.print(
        f"{verb} {ported.target.folder(settings.patches)} and its entry in targets.toml "
        f"({ported.target.status.value}): "
        f"{ported.exact} hunks in place, {ported.moved} moved",
        markup=False,
        soft_wrap=True,
    )
    return 0
