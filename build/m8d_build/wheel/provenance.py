"""Provenance of a patched wheel: statement and SBOM, in its dist-info folder and beside it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.files.blobs import blob_id
from m8d_build.wheel.facts import pinned_requirements
from m8d_build.wheel.wheelfile import open_wheel
from multiworld.provenance.statement import (
    PORTED,
    STATEMENT_NAME,
    Resource,
    Statement,
    parse_statement,
    ported_words,
    statement_bytes,
)
from multiworld.provenance.wheel import signed_statement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from m8d_build.series.read import Series
    from m8d_build.wheel.wheelfile import WheelFile
    from multiworld.shim.marker import Marker

__all__ = [
    "UNVERIFIED",
    "Origin",
    "file_input",
    "files_beside",
    "files_inside",
    "patch_inputs",
    "source_inputs",
]

SBOM_ENTRY = "sboms/multiworld.cdx.json"
UNVERIFIED = "unverified"
"""Among the statement's tools: inputs that are not those on record."""

_PYTORCH = "git+https://github.com/pytorch/pytorch"


@dataclass(frozen=True)
class Origin:
    """What a wheel is made from, as far as its maker knows.

    Attributes:
        inputs: files, packages, patches, sources, in the order of their use.
        compiler: what it says of itself; "" where nothing is compiled.
        unverified: names of the inputs that are not those on record.
    """

    inputs: tuple[Resource, ...] = ()
    compiler: str = ""
    unverified: tuple[str, ...] = ()


def file_input(name: str, sha256: str) -> Resource:
    """Return a file, or a package "name==version", as an input."""
    package, _, version = name.partition("==")
    return Resource(name, sha256, uri=f"pkg:pypi/{package}@{version}" if version else "")


def patch_inputs(series: Series) -> tuple[Resource, ...]:
    """Return a series' patches as inputs."""
    return tuple(Resource(patch.name, patch.sha256) for patch in series.patches)


def source_inputs(contents: Mapping[str, bytes]) -> tuple[Resource, ...]:
    """Return files of PyTorch's sources, as they were read, as inputs."""
    return tuple(Resource(path, blob_id(data), "gitBlob") for path, data in contents.items())


def files_inside(
    wheel: WheelFile, marker: Marker, origin: Origin, digests: Mapping[str, str]
) -> Mapping[str, bytes]:
    """Return statement and SBOM, by their names in the dist-info folder.

    Args:
        wheel: what the patched wheel is made from.
        marker: of the patched wheel.
        origin: what else it is made from.
        digests: SHA-256 of each entry that was changed or added.
    """
    # CycloneDX's library takes a quarter of a second to load: no other command waits for it.
    from m8d_build.wheel.sbom import SBOM_WRITER, make_sbom  # noqa: PLC0415  (no other command waits for it)

    commit = Resource("pytorch", marker.commit, "gitCommit", f"{_PYTORCH}@{marker.commit}")
    # With these the same inputs give the same bytes.
    tools = {"zlib": zlib.ZLIB_RUNTIME_VERSION, "sbom": SBOM_WRITER}
    if origin.compiler:
        tools["compiler"] = origin.compiler
    if origin.unverified:
        tools[UNVERIFIED] = ", ".join(origin.unverified)
    if marker.ported_from:
        tools[PORTED] = ported_words(marker.ported_from)
    statement = Statement(
        subjects=dict(digests),
        torch=marker.torch,
        local=marker.local,
        mode=marker.mode,
        builder=marker.builder,
        inputs=(*origin.inputs, commit),
        tools=tools,
    )
    date = wheel.entries[f"{wheel.dist_info}/RECORD"].date_time
    return {
        STATEMENT_NAME: statement_bytes(statement),
        SBOM_ENTRY: make_sbom(statement, pinned_requirements(wheel), date=date),
    }


def files_beside(path: Path, sha256: str) -> Mapping[str, bytes]:
    """Return both for beside the finished wheel, the statement with the wheel as one more subject.

    Args:
        path: the wheel.
        sha256: of its file.

    Returns:
        By what each name has after that of the wheel.
    """
    wheel = open_wheel(path)
    statement = parse_statement(wheel.read(f"{wheel.dist_info}/{STATEMENT_NAME}"), where=path.name)
    return {
        ".provenance.json": signed_statement(statement, path.name, sha256),
        ".cdx.json": wheel.read(f"{wheel.dist_info}/{SBOM_ENTRY}"),
    }
