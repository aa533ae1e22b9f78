"""``wheel``: put an overlay library that was built already into an official wheel."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.cli import print_json
from m8d_build.cli._common import positive
from m8d_build.errors import CheckFailed, PrerequisiteMissing
from m8d_build.files.blobs import file_sha256
from m8d_build.files.lock import hold
from m8d_build.overlay.graft import graft_edits
from m8d_build.overlay.toolbox import extract
from m8d_build.overlay.write import GRAFTED, write_patched
from m8d_build.series.read import load_series
from m8d_build.targets import load_targets
from m8d_build.wheel.facts import read_facts
from m8d_build.wheel.provenance import file_input
from m8d_build.wheel.repack import SCRATCH, remove_leftovers
from m8d_build.wheel.wheelfile import open_wheel
from multiworld.errors import MarkerError
from multiworld.shim.marker import library_info

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings
    from multiworld.shim.marker import LibraryInfo

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "wheel"
HELP = "Put an overlay library that was built already into an official wheel."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--wheel", type=Path, required=True, metavar="WHL", help="the official wheel")
    parser.add_argument("--overlay", type=Path, required=True, metavar="LIB", help="the overlay library")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the wheel goes (default: out/)")
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="compressors side by side (default: all cores)"
    )
    parser.add_argument(
        "--allow-unverified", action="store_true", help="accept a wheel that is not on record"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Check wheel and overlay, graft, repack; print the new wheel's path, size and SHA-256.

    Headers that the patches change stay the official ones: they are not known here. ``overlay`` replaces
    them.
    The wheel counts as unverified, in its label and its statement: the library names its topics, but no
    digest of the patches that it was built from.

    Raises:
        WheelInvalid, WheelMismatch, WheelAlreadyPatched: the wheel is not the target's official one.
        PrerequisiteMissing: the overlay is not there, or says nothing of patches.
        CheckFailed, ElfInvalid: it does not fit the wheel.
        BuildBusy, DiskFull, OutputUnwritable: the output folder.
    """
    wheel = open_wheel(args.wheel)
    target = load_targets(settings.patches).get(wheel.version.public)
    sha256 = file_sha256(wheel.path)
    on_record = wheel.check_against(
        target, wheel.python_tags[0], sha256=sha256, allow_unverified=args.allow_unverified
    )
    info = _info(args.overlay, target.version)
    series = load_series(settings.patches, target.version)
    if info.topics != series.topics:
        raise CheckFailed(
            f"{args.overlay} was built with {', '.join(info.topics) or 'no topics'}",
            rule=f"the series of {target.version} is {', '.join(series.topics) or 'empty'}",
            next_step="Build it anew from this checkout: `python -m m8d_build overlay`",
        )
    if beyond := [path for path in series.paths if path.endswith(".py")]:
        raise CheckFailed(
            f"the series of {target.version} changes {', '.join(beyond)} as well",
            rule="this command puts a library into a wheel, and no Python files",
            next_step="Build library and wheel: `python -m m8d_build overlay`",
        )
    with hold(settings.out, what=f"repack {wheel.path.name}"):
        remove_leftovers(settings.out)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=settings.out) as folder:
            unpacked = Path(folder)
            extract(wheel.path, unpacked, lambda name: name.startswith("torch/lib/") and ".so" in name)
            facts = read_facts(wheel, installed=unpacked)
            facts.check_against(target)
            grafted = graft_edits(unpacked / GRAFTED, args.overlay)
            # It names its topics, but no digest of their patches: what it was built from is not known.
            library = [file_input(args.overlay.name, file_sha256(args.overlay))]
            made = write_patched(
                wheel,
                sha256,
                facts,
                target,
                series,
                args.overlay,
                grafted,
                settings,
                inputs=library,
                unverified=(*(() if on_record else (wheel.path.name,)), args.overlay.name),
            )
    if args.json:
        print_json(console, {"path": str(made.path), "size": made.size, "sha256": made.sha256})
    else:
        console.print(f"{made.path}\n  {made.size} bytes, sha256 {made.sha256}", markup=False, soft_wrap=True)
    return 0


def _info(overlay: Path, version: str) -> LibraryInfo:
    try:
        info = library_info(overlay)
    except MarkerError as exc:
        raise CheckFailed(exc.value, rule=exc.rule, next_step=exc.next_step) from exc
    if info is None or info.torch != version:
        found = (
            f"is of torch {info.torch}"
            if info
            else "says nothing of patches"
            if overlay.exists()
            else "is missing"
        )
        raise PrerequisiteMissing(
            f"{overlay} {found}",
            rule=f"it must be an overlay library built for torch {version}",
            next_step="Build it with `python -m m8d_build overlay`",
        )
    return info
