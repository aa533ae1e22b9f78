"""The machine of a run: hardware, load, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """The machine and its software, for a record."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def load() -> float:
    """How many processes ran or wanted to, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def same_kind(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether absolute values of the two can be compared: processor, cores, and about as much memory."""
    if any(one.get(name) != other.get(name) for name in ("cpu", "cores")):
        return False
    sizes = sorted(float(each.get("memory_gb") or 0.0) for each in (one, other))
    return sizes[0] >= 0.9 * sizes[1]


def words(machine: Mapping[str, Any]) -> str:
    """A machine in a line."""
    said = [str(machine.get("cpu") or "a processor without a name"), f"{machine['cores']} cores"]
    if machine.get("memory_gb"):
        said.append(f"{machine['memory_gb']:g} GB")
    said.append(f"Linux {machine['kernel']}")
    said += [f"{each} {machine[each.lower()]}" for each in ("Python", "torch") if machine.get(each.lower())]
    return ", ".join(said)


def sources() -> str:
    """Digest of the code that is measured and measures, for the record."""
    if str(ROOT / "build") not in sys.path:  # the toolchain is a plain folder
        sys.path.insert(0, str(ROOT / "build"))
    from m8d_build.files.digests import sources_digest  # noqa: PLC0415  (found through the line above)

    return sources_digest("benchmarks")


def commit() -> str:
    """The commit checked out, "+" behind it if files differ from it; "" outside a repository."""
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        return found + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
