"""``apply``: put a version's series into a source tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.series.apply import apply_series, tree_version
from m8d_build.series.read import load_series
from m8d_build.targets import load_targets

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "apply"
HELP = "Apply the series of a version to a PyTorch source tree, all or nothing."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--source", type=Path, required=True, metavar="TREE", help="root of PyTorch's sources"
    )
    parser.add_argument("--torch", metavar="VERSION", help="whose series (default: the tree's own version)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing")
    parser.add_argument(
        "--allow-unverified",
        action="store_true",
        help="take sources whose blob ids differ, if the patches still apply with no fuzz",
    )


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Apply the series and say what changed.

    Raises:
        BuildError: see ``m8d_build.series.apply.apply_series``.
    """
    target = load_targets(settings.patches).get(args.torch or tree_version(args.source))
    series = load_series(settings.patches, target.version)
    receipt = apply_series(
        args.source, target, series, dry_run=args.dry_run, allow_unverified=args.allow_unverified
    )
    verb = "would apply" if args.dry_run else "applied"
    console.print(f"{verb} {', '.join(receipt.topics)} of {receipt.version} to {args.source}", markup=False)
    for file in receipt.files:
        console.print(f"  {file.path}  {file.pre_blob[:12]} -> {file.post_blob[:12]}", markup=False)
    if not receipt.verified:
        console.print("  these are not the sources the target records (--allow-unverified)", markup=False)
    return 0
