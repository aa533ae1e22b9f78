"""Small installed torches for the shim's tests, and runs that are killed at their n-th change of the disk."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from multiworld.shim.torchsite import TorchSite

ROOT = Path(__file__).parents[2]
VERSION = "2.6.0+cu124"
RENDEZVOUS = b"import os\n\n\ndef rendezvous(url):\n    return url\n\n\ndef handler():\n    return None\n"
FILES = {
    "torch/__init__.py": b"from torch.version import __version__\n",
    "torch/version.py": b"from typing import Optional\n\n__version__ = '2.6.0+cu124'\ncuda: Optional[str] = '12.4'\n",
    "torch/distributed/__init__.py": b"",
    "torch/distributed/rendezvous.py": RENDEZVOUS,
    "torch/distributed/old.py": b"a = 1\r\nb = 2\r\n",
}
METADATA = b"Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0+cu124\nSummary: Tensors\n\nName: other\n"


def row(path: str, data: bytes, end: str = "\n") -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}{end}"


def make_site(root: Path, *, end: str = "\r\n", more: dict[str, bytes] | None = None) -> TorchSite:
    """Install a small torch by hand, with a RECORD as pip writes it."""
    info = root / "torch-2.6.0+cu124.dist-info"
    info.mkdir(parents=True)
    lines = [f"../../../bin/torchrun,sha256={'x' * 43},225{end}"]
    for path, data in {**FILES, **(more or {})}.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        lines.append(row(path, data, end))
        if path.endswith(".py"):
            lines.append(f"{path.rpartition('/')[0]}/__pycache__/{place.stem}.cpython-311.pyc,,{end}")
    (info / "METADATA").write_bytes(METADATA)
    lines += [row(f"{info.name}/METADATA", METADATA, end), f"{info.name}/RECORD,,{end}"]
    (info / "RECORD").write_bytes("".join(lines).encode())
    return TorchSite(root, info)


def make_wheel(folder: Path, *, version: str = VERSION, more: dict[str, bytes] | None = None) -> Path:
    """Write a wheel of the small torch that pip installs anywhere, without requirements."""
    info = f"torch-{version}.dist-info"
    files = {
        **FILES,
        "torch/version.py": f"__version__ = '{version}'\n".encode(),
        **(more or {}),
        f"{info}/METADATA": METADATA.replace(VERSION.encode(), version.encode()),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(
        [*(row(path, data) for path, data in files.items()), f"{info}/RECORD,,\n"]
    ).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a folder: files with their bytes, folders as None; what Python compiled is left out."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
        if "__pycache__" not in path.parts
    }


_KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}]
from multiworld.cli.post_setup import main
left = int(sys.argv[1])
def hook(event, args):
    global left
    changes = event in {{"os.rename", "os.remove", "os.mkdir", "os.rmdir"}} or (
        event == "open" and isinstance(args[1], str) and "w" in args[1])
    if changes:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.exit(main(sys.argv[2:]))
"""


def run_killed(step: int, *arguments: str) -> int:
    """Run m8d-post-setup in a process that is killed just before its n-th change of the disk; return its status."""
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", _KILLED.format(root=str(ROOT)), str(step), *arguments],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode in {0, -9}, done.stderr
    return done.returncode
