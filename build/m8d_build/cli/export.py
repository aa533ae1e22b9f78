"""``export``: write the series a patched tree carries, with the edits made in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.series.apply import tree_version
from m8d_build.series.export import export_series
from m8d_build.targets import load_targets

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "export"
HELP = "Write the series of a patched tree back to its folder, with the edits made in the tree."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--source", type=Path, required=True, metavar="TREE", help="root of the patched sources"
    )
    parser.add_argument("--torch", metavar="VERSION", help="whose series (default: the tree's own version)")
    parser.add_argument(
        "--topic", default="", help="the patch that takes the edits (default: the file's last)"
    )
    parser.add_argument("--add", action="append", default=[], metavar="FILE", help="a new file to take in")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="write here (default: patches/vX.Y.Z)")
    parser.add_argument("--refresh", action="store_true", help="make every diff anew, as git writes it")
    parser.add_argument("--dry-run", action="store_true", help="say what would change, write nothing")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Export and say which patches changed.

    Raises:
        BuildError: see ``m8d_build.series.export.export_series``.
    """
    target = load_targets(settings.patches).get(args.torch or tree_version(args.source))
    folder = args.folder or target.folder(settings.patches)
    exported = export_series(
        args.source,
        target,
        folder,
        topic=args.topic,
        add=args.add,
        refresh=args.refresh,
        dry_run=args.dry_run,
    )
    for path in exported.edited:
        console.print(f"edited: {path}", markup=False)
    verb = "would write" if args.dry_run else "wrote"
    what = (
        f"{verb} {', '.join(exported.written)}" if exported.written else "nothing to write, all the same as"
    )
    console.print(f"{what} in {folder}" if exported.written else f"{what} {folder}", markup=False)
    return 0
