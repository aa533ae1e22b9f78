"""Digests of sources and of series: recorded with a measurement, and shown on its page.

Documentation is no source: a record is as good after a page was reworded as before.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MIXED", "RECORDS", "UNKNOWN", "code_digest", "patches_digest", "sources_digest"]

ROOT = Path(__file__).resolve().parents[3]  # benchmarks take this module without the toolchain's packages

UNKNOWN = ""
"""Of a record that is older than this module."""

MIXED = "several"
"""Of a record whose rows were made from different sources."""

RECORDS = {
    "nccl-defects": (
        "tests/testbed/src",
        "tests/testbed/bed",
        "tests/testbed/matrix",
        "tests/testbed/programs",
    ),
    "hardware": ("multiworld", "tests/testbed/matrix", "tests/testbed/programs", "tests/gpu/hardware"),
    "benchmarks": ("multiworld", "benchmarks"),
}
"""By page: the folders of the code it describes. (`m8d_build.testing.versions` has a digest of its own.)"""

_CODE = {".py", ".cpp", ".h", ".hpp", ".cu"}


def sources_digest(record: str, root: Path = ROOT) -> str:
    """Return the digest of the code that a record (of `RECORDS`) is about, as it is now: 12 hex digits."""
    return code_digest(RECORDS[record], (), root)


def code_digest(
    folders: Iterable[str], files: Iterable[Path], root: Path = ROOT, *, but: Iterable[str] = ()
) -> str:
    """Return the digest of the code in folders, and of files: 12 hex digits.

    Args:
        folders: relative to `root`; documentation in them does not count.
        files: that count, whatever they are, below `root`.
        root: of the project.
        but: what of the folders does not count: files and folders relative to `root`.
    """
    left_out = {root / name for name in but}
    found = [path for folder in folders for path in (root / folder).rglob("*") if path.suffix in _CODE]
    return _digest([*(path for path in found if not left_out & {path, *path.parents}), *files], root)


def patches_digest(patches: Iterable[tuple[str, str]]) -> str:
    """Return the digest of patches, as a series has them and as a marker names them; `UNKNOWN` without any.

    Args:
        patches: of each, in the order of the series: its topic, and the SHA-256 of its file in 64 hex digits.

    Returns:
        12 hex digits.
    """
    lines = [f"{topic} {sha256}\n" for topic, sha256 in patches]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12] if lines else UNKNOWN


def _digest(paths: list[Path], root: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return whole.hexdigest()[:12]
