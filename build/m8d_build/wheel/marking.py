"""Marker, loader, licence, notice of modification and provenance, and a wheel written with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from m8d_build.errors import OutputUnwritable, WheelInvalid
from m8d_build.settings import REPO_ROOT
from m8d_build.wheel.changes import Put
from m8d_build.wheel.provenance import files_beside, files_inside
from m8d_build.wheel.relabel import wheel_name
from m8d_build.wheel.repack import repack
from m8d_build.wheel.wheelfile import MARKER_ENTRY, open_wheel
from multiworld.errors import MarkerError
from multiworld.shim.loader import LOADER_ENTRY, loader_text
from multiworld.shim.marker import SCHEMA, Topic, parse_marker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.series.read import Series
    from m8d_build.wheel.changes import Edit
    from m8d_build.wheel.provenance import Origin
    from m8d_build.wheel.repack import Repacked
    from m8d_build.wheel.wheelfile import WheelFile
    from multiworld.shim.marker import Marker

__all__ = ["LICENCE_NAME", "NOTICE_NAME", "make_marker", "make_notice", "topics_of", "write_marked"]

LICENCE = REPO_ROOT / "LICENSE"
LICENCE_NAME = "LICENSE.multiworld"
NOTICE_NAME = "NOTICE.multiworld"


def topics_of(series: Series) -> tuple[Topic, ...]:
    """Return a series' topics as a marker names them."""
    return tuple(Topic(patch.topic, patch.sha256) for patch in series.patches)


def write_marked(
    wheel: WheelFile,
    out_dir: Path,
    changes: Sequence[Put | Edit],
    marker: Marker,
    *,
    origin: Origin,
    platform: str,
    source_sha256: str = "",
    jobs: int = 2,
    cache: Path | None = None,
) -> Repacked:
    """Write a patched wheel, and into it the marker, the loader, our licence, the notice and the provenance.

    Statement and SBOM are written beside it as well.

    Args:
        wheel: what it is made from.
        out_dir: see ``repack``.
        changes: see ``repack``.
        marker: what it says of itself; names its version.
        origin: what it is made from, and with which compiler.
        source_sha256: of the wheel it is made from; "" if that is not an official one.
        platform: see ``repack``.
        jobs: see ``repack``.
        cache: see ``repack``.

    Raises:
        MarkerError: the marker breaks its own schema.
        OutputUnwritable: it would replace a full build by an overlay build.
        BuildError: see ``repack``.
    """
    target = out_dir / wheel_name(wheel, marker.local, platform)
    if marker.mode == "overlay" and mode_of(target) == "full":  # which took hours
        raise OutputUnwritable(
            f"{target} is a full build",
            rule="an overlay build does not replace it, and has the same name",
            next_step="Move it to another folder, or name another one with --out",
        )
    said = [Put(MARKER_ENTRY, make_marker(marker)), Put(LOADER_ENTRY, loader_text())]
    changed = tuple(change.name for change in (*changes, *said))
    notice = make_notice(marker, source=wheel.path.name, source_sha256=source_sha256, changed=changed)
    return repack(
        wheel,
        out_dir,
        [*changes, *said],
        local=marker.local,
        platform=platform,
        notices={LICENCE_NAME: LICENCE.read_bytes(), NOTICE_NAME: notice},
        describe=lambda digests: files_inside(wheel, marker, origin, digests),
        beside=files_beside,
        jobs=jobs,
        cache=cache,
    )


def mode_of(path: Path) -> str:
    """Return how a wheel was built, "" if that cannot be read."""
    try:
        return parse_marker(open_wheel(path).read(MARKER_ENTRY)).mode
    except (WheelInvalid, MarkerError):  # it is not there, or of no use
        return ""


def make_marker(marker: Marker) -> bytes:
    """Return the bytes of torch/m8d.json; the same marker gives the same bytes.

    Raises:
        MarkerError: the marker breaks its own schema.
    """
    raw = {
        "schema": SCHEMA,
        "torch": marker.torch,
        "local": marker.local,
        "commit": marker.commit,
        "topics": [{"name": topic.name, "sha256": topic.sha256} for topic in marker.topics],
        "mode": marker.mode,
        "builder": marker.builder,
        "overlay": {"file": marker.overlay.file, "sha256": marker.overlay.sha256} if marker.overlay else None,
    }
    if marker.ported_from:
        raw["ported_from"] = marker.ported_from
    data = (json.dumps(raw, indent=2) + "\n").encode()
    parse_marker(data)
    return data


def make_notice(marker: Marker, *, source: str, source_sha256: str, changed: tuple[str, ...]) -> bytes:
    """Return the notice of modification that stands in the wheel's dist-info.

    Args:
        marker: what was built.
        source: file name of the wheel it was made from.
        source_sha256: of that file; "" if it is not known.
        changed: names of the entries replaced or added, in any order.
    """
    topics = ", ".join(topic.name for topic in marker.topics) or "none"
    origin = f"those of PyTorch {marker.ported_from}, carried here and not proven by hand"
    lines = [
        f"This is a modified version of PyTorch {marker.torch}, not an official PyTorch build.",
        (
            "It was made by multiworld's patch toolchain. Please do not report its faults to the PyTorch "
            "project."
        ),
        "",
        f"Made from: {source}" + (f" (SHA-256 {source_sha256})" if source_sha256 else ""),
        f"Version:   {marker.torch}+{marker.local}",
        f"Sources:   PyTorch commit {marker.commit}",
        f"Patches:   {topics} ({marker.mode} build, toolchain {marker.builder})",
        *([f"Ported:    the patches are {origin}"] if marker.ported_from else []),
        "",
        "Files replaced or added, besides this folder's:",
        *(f"  {name}" for name in sorted(changed)),
        "",
        "PyTorch's own licence and notices stand unchanged beside this file and go on to apply.",
        f"The changes are under the Apache License 2.0, see {LICENCE_NAME}.",
    ]
    return ("\n".join(lines) + "\n").encode()
