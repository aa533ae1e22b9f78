"""Memory, disk, programs and versions of this machine, as far as a full build needs them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from m8d_build.errors import CommandFailed
from m8d_build.proc import run
from m8d_build.settings import usable_cores

__all__ = ["Compiler", "MachineFacts", "Toolkit", "parse_compiler", "parse_nvcc", "read_machine", "taken_by"]

PROGRAMS = ("git", "conda", "mamba", "micromamba")
ASK_SECONDS = 20.0
TOOLKITS = Path("/usr/local")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        path: full path.
        kind: "gcc", "clang", or "" if it is neither.
        version: (11, 4); () if it does not say.
    """

    path: str
    kind: str
    version: tuple[int, ...]


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit.

    Attributes:
        home: its folder.
        version: "12.4", "" if its nvcc does not say.
    """

    home: str
    version: str


@dataclass(frozen=True)
class MachineFacts:
    """What was found.

    Attributes:
        system: "Linux".
        architecture: "x86_64".
        cores: those this process may use.
        memory: bytes of main memory (a container's limit if that is less); 0 if unknown.
        free: bytes free where the build will be.
        writable: whether a folder can be made there.
        python: version of the Python running this ("3.11").
        python_program: its full path.
        venv: whether it can make virtual environments.
        headers: whether its C headers are there.
        programs: (name, full path) of those found.
        compiler: the C++ compiler the settings name, None if it is not there.
        toolkits: every CUDA toolkit found, the one on PATH first.
    """

    system: str
    architecture: str
    cores: int
    memory: int
    free: int
    writable: bool
    python: str
    python_program: str
    venv: bool
    headers: bool
    programs: tuple[tuple[str, str], ...]
    compiler: Compiler | None
    toolkits: tuple[Toolkit, ...]

    def program(self, name: str) -> str:
        """Return a program's full path, "" if it was not found."""
        return dict(self.programs).get(name, "")

    def toolkit(self, version: str) -> Toolkit | None:
        """Return a CUDA toolkit of a version, None if there is none."""
        return next((toolkit for toolkit in self.toolkits if toolkit.version == version), None)


def read_machine(out: Path, compiler: str) -> MachineFacts:
    """Gather the facts; takes a second at most, asks nothing of the network.

    Args:
        out: where the build will be (need not exist).
        compiler: the C++ compiler's command.
    """
    place = next(path for path in (out, *out.parents) if path.exists())
    programs = ((name, shutil.which(name)) for name in PROGRAMS)
    return MachineFacts(
        system=platform.system(),
        architecture=platform.machine(),
        cores=usable_cores(),
        memory=_memory(),
        free=shutil.disk_usage(place).free,
        writable=place.is_dir() and os.access(place, os.W_OK | os.X_OK),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        python_program=sys.executable,
        venv=find_spec("venv") is not None and find_spec("ensurepip") is not None,
        headers=_has_headers(),
        programs=tuple((name, path) for name, path in programs if path),
        compiler=_compiler(compiler),
        toolkits=_toolkits(),
    )


def taken_by(folder: Path) -> int:
    """Return how many bytes of the disk a folder takes; 0 if it is not there."""
    taken = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # a build that works there has just removed it
                taken += Path(place, name).lstat().st_blocks * 512
    return taken


def parse_compiler(path: str, banner: str) -> Compiler:
    """Return what ``--version`` says of a compiler."""
    kind = "clang" if "clang" in banner else "gcc" if "Free Software Foundation" in banner else ""
    found = re.search(r"version (\d+(?:\.\d+)*)", banner) if kind == "clang" else None
    if kind == "gcc":
        found = re.search(r"\) (\d+(?:\.\d+)+)", banner)
    return Compiler(path, kind, tuple(int(part) for part in found[1].split(".")) if found else ())


def parse_nvcc(banner: str) -> str:
    """Return the CUDA version ``nvcc --version`` says ("12.4"), "" if none."""
    found = re.search(r"release (\d+\.\d+)", banner)
    return found[1] if found else ""


def _compiler(command: str) -> Compiler | None:
    path = shutil.which(command)
    return None if path is None else parse_compiler(path, _ask(path))


def _toolkits() -> tuple[Toolkit, ...]:
    """Those with an nvcc: the one on PATH, then /usr/local/cuda*."""
    found: dict[Path, Toolkit] = {}
    on_path = shutil.which("nvcc")
    places = [Path(on_path)] if on_path else []
    places += sorted(TOOLKITS.glob("cuda*/bin/nvcc"))
    for nvcc in places:
        # A distribution's nvcc may be a script in /usr/bin that starts the real one elsewhere: not a
        # toolkit's folder.
        home = nvcc.resolve().parent.parent
        if home not in found and (home / "include" / "cuda_runtime.h").exists():
            found[home] = Toolkit(str(home), parse_nvcc(_ask(str(nvcc))))
    return tuple(found.values())


def _ask(path: str) -> str:
    """Return what a program says to --version, "" if it fails."""
    try:
        return run((path, "--version"), what=f"ask {path} for its version", timeout=ASK_SECONDS).stdout
    except CommandFailed:
        return ""


def _memory() -> int:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        text = limit.read_text(encoding="ascii").strip()
    except OSError:
        return memory
    return min(memory, int(text)) if text.isdigit() else memory


def _has_headers() -> bool:
    from sysconfig import get_path  # noqa: PLC0415  (slow to import, and only needed here)

    return (Path(get_path("include")) / "Python.h").exists()
