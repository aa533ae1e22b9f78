"""What the tests of sources share: a small PyTorch tree, its target, a scripted source, archives."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from m8d_build.files.blobs import blob_id
from m8d_build.progress import Silent
from m8d_build.settings import Settings
from m8d_build.sources import obtain
from m8d_build.sources.base import Provided, Unavailable
from m8d_build.targets import load_targets

CPP = "torch/csrc/nccl.cpp"
FILES = {CPP: b"int nccl;\n", "version.txt": b"2.6.0a0\n", "c10/util.h": b"#pragma once\n"}
ENOSPC = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def write_target(
    patches: Path, *, blobs: dict[str, str] | None = None, distro: str = "2.6.0+dfsg-7", sha256: str = ""
):
    blobs = {path: blob_id(FILES[path]) for path in (CPP, "version.txt")} if blobs is None else blobs
    lines = ["schema = 1", "[[target]]", 'version = "2.6.0"', 'tag = "v2.6.0"', 'status = "applies"']
    lines += [f'distro_version = "{distro}"', f'distro_sha256 = "{sha256}"', "[target.files]"]
    lines += [f'"{path}" = "{blob}"' for path, blob in blobs.items()]
    patches.mkdir(exist_ok=True)
    (patches / "targets.toml").write_text("\n".join(lines), encoding="utf-8")
    return load_targets(patches).get("2.6.0")


@dataclass
class Fake:
    """A source that answers by its script: files to provide, a reason, or an exception (after half a file)."""

    name: str
    script: list[object]
    resumable: bool = False
    calls: int = 0
    found: list[list[str]] = field(default_factory=list)

    def provide(self, target, wanted, into):
        self.calls += 1
        self.found.append(sorted(p.name for p in into.iterdir()))
        step = self.script.pop(0)
        if isinstance(step, BaseException):
            (into / "half").write_bytes(b"ha")
            raise step
        if isinstance(step, str):
            return Unavailable(f"{self.name} somewhere", step)
        return Provided(write_tree(into / "tree", step), f"{self.name} at 123")


def get(target, settings, *places, wanted=("torch/csrc",), allow_unverified=False, reporter=None):
    return obtain(
        target,
        places,
        settings,
        wanted=wanted,
        allow_unverified=allow_unverified,
        reporter=reporter or Silent(),
    )


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != ".m8d.lock")


def archive_of(
    files: dict[str, bytes], *members: tarfile.TarInfo, top: str = "pytorch-v2.6.0/", compression: str = "xz"
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return buffer.getvalue()


ARCHIVE = archive_of({**FILES, "docs/readme.md": b"not wanted\n", "torch/nn.py": b"not wanted\n"})


def make_settings(tmp_path: Path) -> Settings:
    environment = {"M8D_PYTORCH_GIT": f"file://{tmp_path}/no-such-repository"}
    return Settings.load(
        cache=tmp_path / "cache", patches=tmp_path / "patches", out=tmp_path / "out", environ=environment
    )
