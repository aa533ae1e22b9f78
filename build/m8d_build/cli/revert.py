"""``revert``: remove the applied series from a source tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.errors import WrongTree
from m8d_build.series.apply import revert_series
from m8d_build.series.receipt import load_receipt
from m8d_build.targets import load_targets

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "revert"
HELP = "Take the applied series out of a PyTorch source tree; every byte is as it was before."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--source", type=Path, required=True, metavar="TREE", help="root of the patched sources"
    )
    parser.add_argument(
        "--torch", metavar="VERSION", help="refuse if another version's series is in the tree"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Revert the series and say what it was.

    Raises:
        BuildError: see ``m8d_build.series.apply.revert_series``.
    """
    if args.torch:
        wanted = load_targets(settings.patches).get(args.torch).version
        present = load_receipt(args.source)
        if present is not None and present.version != wanted:
            raise WrongTree(
                f"{args.source} has the series of {present.version}",
                rule=f"{wanted} was asked for",
                next_step=f"Use --torch {present.version}",
            )
    receipt = revert_series(args.source, dry_run=args.dry_run)
    verb = "would revert" if args.dry_run else "reverted"
    console.print(f"{verb} {', '.join(receipt.topics)} of {receipt.version} in {args.source}", markup=False)
    return 0
