"""The patched wheel written: the grafted library, the overlay beside it, the marker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m8d_build.elf.read import glibc_floor
from m8d_build.files.blobs import file_sha256
from m8d_build.wheel.changes import Edit, Put
from m8d_build.wheel.label import local_label
from m8d_build.wheel.marking import topics_of, write_marked
from m8d_build.wheel.provenance import Origin, file_input, patch_inputs
from multiworld import __version__ as builder
from multiworld.shim.marker import Marker, Overlay

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from m8d_build.overlay.graft import GraftResult
    from m8d_build.series.read import Series
    from m8d_build.settings import Settings
    from m8d_build.targets import Target
    from m8d_build.wheel.facts import WheelFacts
    from m8d_build.wheel.repack import Repacked
    from m8d_build.wheel.wheelfile import WheelFile
    from multiworld.provenance.statement import Resource

__all__ = ["GRAFTED", "write_patched"]

GRAFTED = "torch/lib/libtorch_cuda.so"


def write_patched(
    wheel: WheelFile,
    sha256: str,
    facts: WheelFacts,
    target: Target,
    series: Series,
    library: Path,
    grafted: GraftResult,
    settings: Settings,
    more: Iterable[Put] = (),
    inputs: Iterable[Resource] = (),
    compiler: str = "",
    unverified: Iterable[str] = (),
) -> Repacked:
    """Write the patched wheel into the output folder.

    Args:
        wheel: the official one.
        sha256: of its file.
        facts: what it says of itself.
        target: its version.
        series: the patches that are in the overlay.
        library: the overlay.
        grafted: what changes in libtorch_cuda.so.
        settings: output folder, cache, compressors side by side.
        more: other entries to replace or add.
        inputs: what the overlay was built from, besides the official wheel and the patches.
        compiler: what compiled it, as it says itself; "" if that is not known.
        unverified: names of the inputs that are not those on record.

    Raises:
        BuildError: see ``repack``.
    """
    entry, unverified = f"torch/lib/{library.name}", tuple(unverified)
    marker = Marker(
        torch=facts.torch,
        local=local_label(facts.local, target, series.digest, verified=not unverified),
        commit=facts.git_version,
        topics=topics_of(series),
        mode="overlay",
        builder=builder,
        overlay=Overlay(entry, file_sha256(library)),
        ported_from=target.ported_from,
    )
    glibc = max((*glibc_floor(library),), tuple(facts.glibc))
    graft = Edit(GRAFTED, tuple((edit.offset, edit.new) for edit in grafted.edits))
    made_from = (file_input(wheel.path.name, sha256), *patch_inputs(series), *inputs)
    return write_marked(
        wheel,
        settings.out,
        [graft, Put(entry, library, executable=True), *more],
        marker,
        origin=Origin(made_from, compiler, unverified),
        platform=f"manylinux_{glibc[0]}_{glibc[1]}_x86_64",
        source_sha256=sha256,
        jobs=settings.jobs,
        cache=settings.cache / "deflate",
    )
