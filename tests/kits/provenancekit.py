"""A small patched wheel as the toolchain writes one: marker, overlay, statement, SBOM."""

from __future__ import annotations

import hashlib
import zipfile
from typing import TYPE_CHECKING

from kits.fakewheel import COMMIT, record_of, write_wheel
from m8d_build.files.blobs import file_sha256
from m8d_build.wheel.changes import Put
from m8d_build.wheel.marking import write_marked
from m8d_build.wheel.provenance import Origin, file_input
from m8d_build.wheel.wheelfile import open_wheel
from multiworld.provenance.statement import Resource
from multiworld.shim.marker import LIBRARY_PREFIX, Marker, Overlay, Topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from m8d_build.wheel.repack import Repacked

PATCH = hashlib.sha256(b"group-guard").hexdigest()
OVERLAY = "torch/lib/nccl.so.2"
INFO = (
    LIBRARY_PREFIX
    + f'{{"schema":1,"torch":"2.6.0","topics":[{{"name":"group-guard","sha256":"{PATCH}"}}]}}'.encode()
    + b"\0"
)
LIBRARY = b"\x7fELF\0" + INFO
DIST_INFO = "torch-2.6.0+cu124.m8d1.dist-info"


def marker(**changes: object) -> Marker:
    fields: dict[str, object] = {
        "torch": "2.6.0",
        "local": "cu124.m8d1",
        "commit": COMMIT,
        "topics": (Topic("group-guard", PATCH),),
        "mode": "overlay",
        "builder": "1.0.0",
        "overlay": Overlay(OVERLAY, hashlib.sha256(LIBRARY).hexdigest()),
        **changes,
    }
    return Marker(**fields)


def patched_wheel(folder: Path, out: str = "out", **changes: object) -> Repacked:
    """Write an official wheel and the patched one made from it; ``changes`` are those of its marker."""
    official = write_wheel(folder / "official")
    sha256 = file_sha256(official)
    inputs = (
        file_input(official.name, sha256),
        Resource("0001-group-guard.patch", PATCH),
        file_input("nvidia-nccl-cu12==2.21.5", "a" * 64),
        Resource("torch/csrc/x.cpp", "b" * 40, "gitBlob"),
    )
    return write_marked(
        open_wheel(official),
        folder / out,
        [Put(OVERLAY, LIBRARY, executable=True)],
        marker(**changes),
        origin=Origin(inputs, "g++ 12.2.0"),
        platform="manylinux_2_17_x86_64",
        source_sha256=sha256,
    )


def rewritten(path: Path, change: Callable[[dict[str, bytes]], object], *, record: bool = True) -> Path:
    """Write the wheel anew after `change` had its files; with `record`, RECORD is made to agree."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    old = files.pop(f"{DIST_INFO}/RECORD")
    change(files)
    folder = path.parent / "changed"
    return write_wheel(folder, files, name=path.name, record=record_of(files, DIST_INFO) if record else old)
