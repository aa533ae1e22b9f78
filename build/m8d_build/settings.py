"""Settings: argument > M8D_* environment > default. Nothing else in the toolchain reads os.environ."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

__all__ = ["REPO_ROOT", "Settings", "available_memory_mb", "usable_cores"]

# The largest unit of 2.6.0 takes 1.9 GB; with the toolchain itself a build stays below 2.5 GB.
MEMORY_MB = 2300
REPO_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    """Folders and switches of one run.

    Attributes:
        cache: downloads, sources, environments and objects that outlive a run (M8D_CACHE; default: a folder
            ``m8d`` under the user's cache folder). Safe to delete while no run works with it.
        patches: the folder with targets.toml and the series.
        out: wheels and logs of this run (``out/`` in the working folder).
        compiler: the C++ compiler's command (M8D_CXX, then CXX, then ``g++``).
        jobs: how many compilers run side by side (M8D_JOBS; default: the cores this process may use).
        memory_mb: what the compilers may take together (M8D_MEMORY_MB; default: 2300, or less where the
            machine has less to give). More lets the largest units compile side by side.
        git_url: where PyTorch's git repository is (M8D_PYTORCH_GIT; default: upstream).
    """

    cache: Path
    patches: Path
    out: Path
    compiler: str
    jobs: int
    memory_mb: int
    git_url: str

    @classmethod
    def load(
        cls,
        *,
        cache: Path | None = None,
        patches: Path | None = None,
        out: Path | None = None,
        jobs: int | None = None,
        environ: dict[str, str] | None = None,
    ) -> Settings:
        """Settle every setting.

        Raises:
            ValueError: M8D_JOBS or M8D_MEMORY_MB is not a positive whole number.
        """
        env = dict(os.environ) if environ is None else environ
        if jobs is None:
            jobs = _number(env, "M8D_JOBS") or usable_cores()
        memory = _number(env, "M8D_MEMORY_MB") or min(MEMORY_MB, available_memory_mb() or MEMORY_MB)
        return cls(
            cache=(cache or Path(env.get("M8D_CACHE") or user_cache_path("m8d"))).expanduser().absolute(),
            patches=(patches or REPO_ROOT / "patches").absolute(),
            out=(out or Path.cwd() / "out").absolute(),
            compiler=env.get("M8D_CXX") or env.get("CXX") or "g++",
            jobs=jobs,
            memory_mb=memory,
            git_url=env.get("M8D_PYTORCH_GIT") or "https://github.com/pytorch/pytorch.git",
        )


def _number(env: dict[str, str], name: str) -> int:
    """Return a positive whole number from the environment, 0 if it is not set."""
    given = env.get(name, "")
    if given and (not given.isdigit() or int(given) < 1):
        raise ValueError(f"{name} is {given!r}. It must be a whole number from 1 up. Unset it or fix it.")
    return int(given) if given else 0


def usable_cores() -> int:
    """Return how many cores this process may use; where the system does not say, how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS: it is refused, but in words


def available_memory_mb() -> int:
    """Return the memory this machine can give without swapping, in MB; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(
            int(line.split()[1]) * 1024 // 1_000_000 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
