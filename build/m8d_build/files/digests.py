"""Digests of sources and of series: recorded with a measurement, and shown on its page.

Documentation is no source: a record is as good after a page was reworded as before.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["MIXED", "RECORDS", "UNKNOWN", "series_digest", "sources_digest"]

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
"""By page: the folders whose code it describes, or is made with. (`m8d_build.testing.versions` has a digest of its own.)"""

_CODE = {".py", ".cpp", ".h", ".hpp", ".cu"}


def sources_digest(record: str, root: Path = ROOT) -> str:
    """Return the digest of the code that a record (of `RECORDS`) is about, as it is now: 12 hex digits."""
    found = [
        path for folder in RECORDS[record] for path in (root / folder).rglob("*") if path.suffix in _CODE
    ]
    return _digest(found, root)


def series_digest(version: str, root: Path = ROOT) -> str:
    """Return the digest of a version's patches ("2.6.0"), as they are now; `UNKNOWN` where there are none."""
    folder = root / "patches" / f"v{version.partition('+')[0]}"
    found = [path for path in folder.rglob("*") if path.is_file()]
    return _digest(found, root) if found else UNKNOWN


def _digest(paths: list[Path], root: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return whole.hexdigest()[:12]
