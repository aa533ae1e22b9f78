"""Which series besides the default one are due: those whose code is not the one that was last built and shown at work.

CI builds the default series each time. Another one takes five minutes of two cores, and most changes do not touch what
it is made from. `nox -s series` builds the others, shows their patches at work on the test bed, and records that in
``tests/series.json``; while the record is of the present code, CI leaves that series out, and says so.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build"))

from m8d_build.files.digests import code_digest  # noqa: E402  (its folder is found by the line above)

__all__ = ["OTHERS", "RECORD", "code_of", "due", "main", "record"]

OTHERS = ("2.6.0", "2.9.1")
"""Versions with a verified series, but for the default."""

RECORD = ROOT / "tests" / "series.json"
NOT_DUE = 3
"""Exit status of ``due`` for a series that is not."""

_FOLDERS = (
    "build/m8d_build", "multiworld/provenance", "multiworld/shim",
    "tests/testbed/bed", "tests/testbed/src", "tests/testbed/programs",
)  # fmt: skip
_LEFT_OUT = ("build/m8d_build/full", "build/m8d_build/cli/full.py", "build/m8d_build/cli/fetch.py")
"""The build from PyTorch's sources, and the command that only fetches them: no overlay wheel is made with these."""

_FILES = (
    "multiworld/__init__.py", "multiworld/errors.py", "patches/targets.toml",
    "tests/testbed/conftest.py", "tests/testbed/pairkit.py",
)  # fmt: skip


def code_of(version: str, root: Path = ROOT) -> str:
    """Return the digest of all that a series' wheel is made from, but for downloads, and of what shows it at work."""
    tests = (root / "tests" / "testbed").glob("test_patches_*.py")
    patches = (path for path in (root / "patches" / f"v{version}").iterdir() if path.is_file())
    return code_digest(_FOLDERS, [*(root / name for name in _FILES), *tests, *patches], root, but=_LEFT_OUT)


def due(version: str, file: Path = RECORD, root: Path = ROOT) -> str:
    """Return "" where a series is due, else what is said instead of its build."""
    found = json.loads(file.read_text(encoding="utf-8")).get(version) if file.exists() else None
    if found is None or found["code"] != code_of(version, root):
        return ""
    return f"series {version}: built and shown at work from this very code on {found['on']} (nox -s series)"


def record(version: str, file: Path = RECORD, root: Path = ROOT) -> None:
    """Record that a series of the present code was built, and that the tests of its patches passed."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    today = dt.datetime.now(dt.timezone.utc).date()
    found[version] = {"code": code_of(version, root), "on": today.isoformat()}
    file.write_text(json.dumps(dict(sorted(found.items())), indent=2) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """``due VERSION`` exits with 0 if it is, with 3 and a line if not; ``record VERSION`` records it."""
    parser = argparse.ArgumentParser(prog="series", description=main.__doc__)
    parser.add_argument("what", choices=["due", "record"])
    parser.add_argument("version", choices=OTHERS)
    args = parser.parse_args(argv)
    if args.what == "record":
        record(args.version)
        return 0
    if said := due(args.version):
        print(said)  # noqa: T201  (CI's last lines)
        return NOT_DUE
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
