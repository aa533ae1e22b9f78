"""``fetch``: get PyTorch's sources of one version, and say where they are."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.cli._common import choose_target, python_tag
from m8d_build.errors import OutputUnwritable
from m8d_build.files.disk import copy_sources, needs_room
from m8d_build.files.lock import using
from m8d_build.progress import Progress, Silent
from m8d_build.sources import CHOICES, SPARSE, fetch_source

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings
    from m8d_build.sources import SourceTree

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "fetch"
HELP = "get PyTorch's sources of one version"


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--torch", metavar="VERSION", help="default: the newest verified one for this Python")
    parser.add_argument(
        "--source", default="auto", metavar="WHERE", help=f"{', '.join(CHOICES)}, or a folder (default: auto)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="copy the tree into this new or empty folder")
    parser.add_argument(
        "--allow-unverified", action="store_true", help="accept files whose git blob ids differ"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Fetch, copy if asked to, and print the tree's path and origin.

    Raises:
        BuildError: as m8d_build.sources.fetch_source; OutputUnwritable: ``--out`` is not an empty folder;
            WrongTree: something in the tree cannot be copied.
    """
    target = choose_target(args, settings, python_tag(None))
    out: Path | None = args.out.absolute() if args.out else None
    if out is not None:
        _refuse_used(out)
    reporter = Silent() if args.json else Progress([], console)
    # A folder is no part of the cache, which need not be there then.
    with using(settings.cache) if args.source in CHOICES else contextlib.nullcontext():
        tree = fetch_source(
            target, settings, source=args.source, allow_unverified=args.allow_unverified, reporter=reporter
        )
        root = tree.root if out is None else _copy(tree, out)
    if args.json:
        said = {
            "torch": target.version,
            "path": str(root),
            "origin": tree.origin,
            "verified": tree.verified,
            "notes": list(tree.notes),
        }
        console.print_json(json.dumps(said))
    else:
        console.print(f"torch {target.version}: {root}", markup=False, soft_wrap=True)
        state = "blob ids checked" if tree.verified else "NOT VERIFIED"
        console.print(f"from {tree.origin} ({state})", markup=False, soft_wrap=True)
    return 0


def _refuse_used(out: Path) -> None:
    try:
        used = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as exc:
        raise _unwritable(out, exc.strerror or str(exc)) from exc
    if used:
        raise _unwritable(out, "something is there already")


def _copy(tree: SourceTree, out: Path) -> Path:
    """Copy what a build needs of a tree, beside its place first."""
    with needs_room(out, "copying the sources"):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as part:
                making = Path(part) / "tree"
                making.mkdir()
                for folder in SPARSE:
                    if (tree.root / folder).is_dir():
                        copy_sources(tree.root / folder, making / folder)
                for file in tree.root.iterdir():
                    if file.is_file() and not file.is_symlink():
                        shutil.copy2(file, making / file.name)
                making.replace(out)
        except PermissionError as exc:
            raise _unwritable(out, exc.strerror or str(exc)) from exc
    return out


def _unwritable(out: Path, why: str) -> OutputUnwritable:
    return OutputUnwritable(
        f"{out}: {why}",
        rule="--out names a new or empty folder we may write",
        next_step="Name another folder with --out",
    )
