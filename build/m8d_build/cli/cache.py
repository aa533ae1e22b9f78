"""``cache``: the sizes of downloads, sources, environments and objects, and pruning of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.table import Table

from m8d_build.cli import print_json
from m8d_build.cli._common import say
from m8d_build.files.cachedir import KINDS, prune, survey, unused
from m8d_build.files.lock import CACHE_OPTION, hold, pruning

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "cache"
HELP = "show what is kept between runs; with --prune, remove what was not used lately"


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--prune", action="store_true", help="remove what was not used for --days days")
    parser.add_argument(
        "--days", type=float, default=30.0, metavar="N", help="default: 30; 0 removes everything"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Show the cache, after pruning it if asked to.

    Raises:
        BuildBusy: another run is pruning, or uses the cache.
        OutputUnwritable: something cannot be removed; all else is.
    """
    freed = 0
    if args.prune:
        with hold(settings.cache, what="prune the cache", option=CACHE_OPTION), pruning(settings.cache):
            freed = prune(unused(survey(settings.cache), args.days, time.time()))
    entries = survey(settings.cache)
    kinds = {
        kind: (sum(e.kind == kind for e in entries), sum(e.size for e in entries if e.kind == kind))
        for kind in KINDS
    }
    if args.json:
        sizes = {kind: {"entries": count, "bytes": size} for kind, (count, size) in kinds.items()}
        print_json(console, {"cache": str(settings.cache), "freed": freed, "kinds": sizes})
        return 0
    table = Table("kind", "entries", "MB", "what", box=None)
    for kind, (count, size) in kinds.items():
        table.add_row(kind, str(count), f"{size / 1e6:.0f}", KINDS[kind])
    say(console, str(settings.cache))
    console.print(table)
    if args.prune:
        say(console, f"removed {freed / 1e6:.0f} MB")
    return 0
