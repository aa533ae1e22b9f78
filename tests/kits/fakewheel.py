"""Small torch wheels for the tests: every file a real one has that the toolchain looks at, some kilobytes long."""

from __future__ import annotations

import base64
import hashlib
import random
import zipfile
from typing import TYPE_CHECKING

from m8d_build.targets import Abi, OfficialWheel, Status, Target

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "2236df1770800ffea5697b11b0bb0d910b2e59e1"
NAME = "torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl"
CPU_FLAGS = b"-D_GLIBCXX_USE_CXX11_ABI=0 -fabi-version=11 -fvisibility-inlines-hidden -O2"
METADATA = b"""Metadata-Version: 2.1
Name: torch
Version: 2.6.0
Summary: Tensors
Requires-Dist: filelock
Requires-Dist: typing-extensions (>=4.10.0)
Requires-Dist: nvidia-cuda-runtime-cu12 (==12.4.127) ; platform_system == "Linux" and platform_machine == "x86_64"
Requires-Dist: nvidia-nccl-cu12 (==2.21.5) ; platform_system == "Linux" and platform_machine == "x86_64"

Version: 9.9.9 of the body is no header
"""
WHEEL = b"""Wheel-Version: 1.0
Generator: bdist_wheel (0.34.2)
Root-Is-Purelib: false
Tag: cp311-cp311-linux_x86_64

"""
VERSION = f"""from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.6.0+cu124'
debug = False
cuda: Optional[str] = '12.4'
git_version = '{COMMIT}'
hip: Optional[str] = None
""".encode()
CMAKE = b"""set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")
set_target_properties(torch PROPERTIES
    CXX_STANDARD 17
)
"""


def big(size: int = 300_000, seed: int = 0) -> bytes:
    """Bytes that compress somewhat."""
    source = random.Random(seed)  # noqa: S311  (test data, the same every time)
    words = [source.randbytes(24) for _ in range(200)]
    return b"".join(source.choice(words) for _ in range(size // 24 + 1))[:size]


def contents(**more: bytes) -> dict[str, bytes]:
    """The files of a small official wheel, RECORD left out."""
    return {
        "torch-2.6.0.dist-info/LICENSE": b"BSD\n",
        "torch-2.6.0.dist-info/METADATA": METADATA,
        "torch-2.6.0.dist-info/WHEEL": WHEEL,
        "torch/__init__.py": b"from torch.version import __version__\n",
        "torch/version.py": VERSION,
        "torch/lib/libtorch_cuda.so": big(),
        "torch/lib/libc10.so": b"\x7fELF\0_ZN3c106detail14torchCheckFailEPKcS2_jRKSs\0",
        "torch/share/cmake/Torch/TorchConfig.cmake": CMAKE,
        **more,
    }


def record_of(files: dict[str, bytes], dist_info: str) -> bytes:
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        quoted = f'"{name}"' if "," in name else name
        rows.append(f"{quoted},sha256={digest},{len(data)}\n")
    return ("".join(rows) + f"{dist_info}/RECORD,,\n").encode()


def write_wheel(
    folder: Path,
    files: dict[str, bytes] | None = None,
    *,
    name: str = NAME,
    record: bytes | None = None,
    folders: bool = True,
) -> Path:
    """Write a wheel; RECORD is right unless given."""
    files = contents() if files is None else files
    dist_info = next(
        (entry.split("/")[0] for entry in files if ".dist-info/" in entry), "torch-2.6.0.dist-info"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        if folders:
            archive.writestr(zipfile.ZipInfo(f"{dist_info}/", (2025, 1, 24, 23, 0, 0)), b"")
        for entry, data in files.items():
            info = zipfile.ZipInfo(entry, (2025, 1, 25, 1, 17, 20))
            info.external_attr = (0o100755 if ".so" in entry else 0o100644) << 16
            info.compress_type = zipfile.ZIP_STORED if entry.endswith(".stored") else zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
        data = record_of(files, dist_info) if record is None else record
        archive.writestr(zipfile.ZipInfo(f"{dist_info}/RECORD", (2025, 1, 27, 14, 54, 12)), data)
    return path


DAMAGES = ("name", "deflate", "lzma", "bz2", "encrypted", "offset")


def damage(path: Path, entry: str, how: str) -> Path:
    """Damage an entry (ASCII name, not empty) in one of the ways in DAMAGES, without changing its CRC."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info, directory = archive.getinfo(entry), archive.start_dir
    name, local = entry.encode(), info.header_offset
    content = local + 30 + len(name)
    listed = data.index(b"PK\x01\x02", directory)
    while data[listed + 46 :][: len(name)] != name:
        listed = data.index(b"PK\x01\x02", listed + 4)
    flags, method, begins = 0, zipfile.ZIP_DEFLATED, b"\xff\xff"
    if how == "name":
        flags, begins = 0x800, b""  # UTF-8, says the directory
        data[local + 30] = 0xFF
    elif how == "encrypted":
        flags, begins = 0x1, b""
    elif how == "lzma":
        method, begins = zipfile.ZIP_LZMA, b"\x09\x04\x00\x00"
    elif how == "bz2":
        method = zipfile.ZIP_BZIP2
    elif how == "offset":  # of the directory: entries seem to begin before the file
        end = data.rindex(b"PK\x05\x06") + 16
        data[end : end + 4] = (directory + 1000).to_bytes(4, "little")
    for header in (local + 6, listed + 8):
        data[header : header + 4] = flags.to_bytes(2, "little") + method.to_bytes(2, "little")
    data[content : content + len(begins)] = begins
    path.write_bytes(data)
    return path


def target_of(path: Path | None = None, **changes: object) -> Target:
    """The target of torch 2.6.0, with one wheel on record if given."""
    known = (
        OfficialWheel(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), "cu124", COMMIT)
        if path
        else None
    )
    fields: dict[str, object] = {
        "version": "2.6.0",
        "tag": "v2.6.0",
        "commit": COMMIT,
        "status": Status.APPLIES,
        "note": "",
        "defects": (),
        "topics": (),
        "files": (),
        "units": (),
        "abi": Abi(False, 11, "gnu++17", "12.4"),
        "wheels": (known,) if known else (),
        "distro_version": "",
    }
    return Target(**{**_defaults(), **fields, **changes})  # type: ignore[arg-type]


def _defaults() -> dict[str, object]:
    """Empty values for fields of Target that these tests do not look at."""
    from dataclasses import fields

    return {field.name: () for field in fields(Target)}
