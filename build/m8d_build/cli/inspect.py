"""``inspect``: a wheel's marker, patches and symbols, and whether they agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.cli import print_json
from m8d_build.cli._common import existing_wheel
from m8d_build.errors import CheckFailed
from m8d_build.wheel.inspect import inspect_wheel
from multiworld.provenance.statement import ported_words

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.console import Console

    from m8d_build.settings import Settings
    from m8d_build.wheel.inspect import Bindings, Inspection

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "inspect"
HELP = "Say what a wheel carries: its marker, its patches, which symbols bind where, and whether all agrees."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("wheel", type=Path, metavar="WHEEL", help="a torch wheel, patched or official")
    parser.add_argument("--no-symbols", action="store_true", help="leave out which symbols bind where (10 s)")
    parser.add_argument("--deep", action="store_true", help="read every entry and compare it with RECORD")
    parser.add_argument("--json", action="store_true", help="print JSON, with the names of all symbols")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Print what was found; return 0, or CheckFailed's code if something disagrees.

    Raises:
        WheelInvalid, ElfInvalid, DiskFull: as in ``m8d_build.wheel.inspect.inspect_wheel``.
    """
    found = inspect_wheel(
        existing_wheel(args.wheel), settings.patches, symbols=not args.no_symbols, deep=args.deep
    )
    if args.json:
        print_json(console, _plain(found))
    else:
        for line in _lines(found):
            console.print(line, markup=False, soft_wrap=True)
    return 0 if found.consistent else CheckFailed.exit_code


def _lines(found: Inspection) -> Iterator[str]:
    yield f"{found.path.name}: torch {found.version}"
    marker = found.marker
    if marker is not None:
        yield f"  patched: {marker.mode} build, toolchain {marker.builder}, PyTorch commit {marker.commit}"
        if marker.ported_from:
            yield f"  ported {ported_words(marker.ported_from)}"
        for topic in found.topics:
            yield f"  topic {topic.name}: {_MEANING[topic.status.value]} ({topic.sha256[:12]})"
    elif found.consistent:
        yield "  not patched"
    if found.library is not None and marker is not None:
        topics = ", ".join(found.library.topics) or "no topics"
        yield f"  {marker.library} says: torch {found.library.torch}, {topics}"
    if found.bindings is not None:
        yield from _binding_lines(found.bindings)
    for note in found.notes:
        yield f"  note: {note}"
    for text in found.disagreements:
        yield f"  DISAGREES: {text}"
    if found.consistent:
        yield "  everything agrees"


_MEANING = {
    "same": "the patch of this checkout",
    "differs": "another text than the patch of this checkout",
    "unknown": "this checkout has no such patch",
}


def _binding_lines(bindings: Bindings) -> Iterator[str]:
    name = bindings.overlay.rpartition("/")[2]
    yield f"  libtorch_cuda.so {'asks' if bindings.needed else 'does not ask'} for {name}"
    yield f"  {len(bindings.moved)} symbols bind to {name} instead of libtorch_cuda.so"
    yield f"  {len(bindings.added)} symbols are in {name} only"
    yield f"  {len(bindings.shared)} symbols are found in both (one of them is used by all)"


def _plain(found: Inspection) -> dict[str, object]:
    marker, bindings = found.marker, found.bindings
    return {
        "path": str(found.path),
        "version": found.version,
        "tags": list(found.tags),
        "patched": marker is not None,
        "consistent": found.consistent,
        "disagreements": list(found.disagreements),
        "notes": list(found.notes),
        "marker": None
        if marker is None
        else {
            "torch": marker.torch,
            "local": marker.local,
            "commit": marker.commit,
            "mode": marker.mode,
            "builder": marker.builder,
            "ported_from": marker.ported_from or None,
            "overlay": None
            if marker.overlay is None
            else {"file": marker.overlay.file, "sha256": marker.overlay.sha256},
        },
        "topics": [
            {"name": topic.name, "sha256": topic.sha256, "status": topic.status.value}
            for topic in found.topics
        ],
        "library": None
        if found.library is None
        else {"torch": found.library.torch, "topics": list(found.library.topics)},
        "bindings": None
        if bindings is None
        else {
            "overlay": bindings.overlay,
            "needed": bindings.needed,
            "moved": list(bindings.moved),
            "added": list(bindings.added),
            "shared": list(bindings.shared),
            "ambiguous": list(bindings.ambiguous),
            "lost": list(bindings.lost),
        },
    }
