"""Compile the double for one interpreter's torch. ``python -m bed.build PYTHON`` prints the library's path."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from bed.errors import BedError
from bed.site import TorchSite, look
from bed.symbols import defined, stubs_source, wanted
from m8d_build import proc
from m8d_build.errors import BuildError, CommandFailed
from m8d_build.files.lock import hold
from m8d_build.overlay.compile import NO_FOREIGN_HEADERS
from m8d_build.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["build"]

SOURCES = Path(__file__).resolve().parents[1] / "src"
LIBRARY = "libm8d_testbed.so"
# -O1: half the time of -O2, and fast enough. -g1: function names and lines in a backtrace.
FLAGS = ("-std=c++17", "-O1", "-g1", "-fPIC", "-pthread", "-Wall", "-Wextra")
# torch finds the driver by its soname. A library that is loaded before everything else must not bring a second
# libstdc++ with it, nor need one.
LINK = (
    "-shared",
    "-pthread",
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,-Bsymbolic",
    "-Wl,-soname,libcuda.so.1",
)
KEPT = 8  # libraries in the cache; a run with every target uses five
COMPILE_SECONDS = 300.0
WAIT_SECONDS = 300.0  # for another process that builds


def build(python: Path, *, cache: Path | None = None, say: Callable[[str], object] = print) -> Path:
    """Return the double for an interpreter's torch, compiled if it is not in the cache.

    Args:
        python: an interpreter with a CUDA build of torch.
        cache: the folder of libraries (default: ``testbed`` in the toolchain's cache, which M8D_CACHE names).
        say: told what is done.

    Raises:
        BedError: the interpreter has no such torch or its headers are missing; there is no compiler; it failed.
    """
    site = look(Path(python))
    settings = Settings.load()
    cache = cache or settings.cache / "testbed"
    compiler = _compiler(settings.compiler)
    names = wanted(site.libraries(), [_text(_header(site, "cuda.h")), _text(_header(site, "nccl.h"))])
    key = _key(site, compiler, names)
    folder = cache / f"{site.torch}-{key}"
    library = folder / LIBRARY
    try:
        with hold(cache, what=f"build the test bed for torch {site.torch}", wait=WAIT_SECONDS):
            if not library.exists():
                started = time.monotonic()
                say(f"building the test bed for torch {site.torch} (CUDA {site.cuda}, NCCL {site.nccl})")
                counts = _make(site, compiler, names, folder, settings.jobs)
                say(f"built in {time.monotonic() - started:.1f} s: {counts[0]} functions, {counts[1]} stubs")
            os.utime(folder)
            used = {path: path.stat().st_mtime for path in cache.iterdir() if path.is_dir()}
            for old in to_drop(used, KEPT):
                shutil.rmtree(old, ignore_errors=True)
    except BedError:
        raise
    except BuildError as exc:
        raise BedError(f"the test bed could not be built: {exc}") from exc
    return library


def to_drop(used: dict[Path, float], kept: int) -> list[Path]:
    """Return the folders that go: all but the ones used last, given when each was used."""
    return sorted(used, key=lambda path: used[path], reverse=True)[kept:]


def _make(site: TorchSite, compiler: str, names: set[str], folder: Path, jobs: int) -> tuple[int, int]:
    """Compile and link into ``folder``; return how many functions are modelled and how many are stubs."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            objects = list(pool.map(lambda source: _compile(compiler, site, source, scratch), sources))
        modelled = defined(objects) & names
        stubs = scratch / "stubs.cpp"
        stubs.write_text(stubs_source(names - modelled), encoding="utf-8")
        objects.append(_compile(compiler, site, stubs, scratch))
        made = scratch / "library"
        made.mkdir()
        script = f"-Wl,--version-script={SOURCES / 'exports.map'}"
        _run([compiler, *LINK, script, "-o", made / LIBRARY, *objects, "-ldl"], "link the test bed")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
        return len(modelled), len(names - modelled)


def _compile(compiler: str, site: TorchSite, source: Path, scratch: Path) -> Path:
    made = scratch / f"{source.stem}.o"
    headers = [part for folder in site.includes for part in ("-isystem", folder)]
    own = ["-I", SOURCES, "-I", SOURCES / "shim"]
    _run([compiler, *FLAGS, *own, *headers, "-c", source, "-o", made], f"compile {source.name}")
    return made


def _run(command: list[str | Path], what: str) -> None:
    try:
        proc.run(command, what=what, env=NO_FOREIGN_HEADERS, timeout=COMPILE_SECONDS)
    except CommandFailed as exc:
        raise BedError(
            f"the compiler could not {what}:\n{exc.tail or exc}",
            rule="the double is C++17 for g++ or clang++",
            next_step="Name another compiler with CXX",
        ) from exc


def _compiler(command: str) -> str:
    found = shutil.which(command)
    if found is None:
        raise BedError(
            f"the compiler {command!r} is not on PATH",
            rule="the test bed is compiled on this machine",
            next_step="Install g++, or name a compiler with CXX",
        )
    return found


def _key(site: TorchSite, compiler: str, names: set[str]) -> str:
    """Return a short digest of everything that the library is made of."""
    version = proc.run([compiler, "--version"], what=f"ask {compiler} for its version", timeout=60.0).stdout
    digest = hashlib.sha256()
    for text in (compiler, version, *FLAGS, *LINK, *sorted(names)):
        digest.update(text.encode() + b"\0")
    headers = [_header(site, name) for name in ("cuda.h", "cuda_runtime_api.h", "driver_types.h", "nccl.h")]
    own = sorted(path for path in SOURCES.rglob("*") if path.is_file())
    for path in (*own, *headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _header(site: TorchSite, name: str) -> Path:
    return site.includes[1 if name == "nccl.h" else 0] / name


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def main(argv: list[str] | None = None) -> int:
    """Build for the interpreter named, and print where the library is."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m bed.build PYTHON", file=sys.stderr)  # noqa: T201
        return 2
    try:
        library = build(Path(arguments[0]), say=lambda text: print(text, file=sys.stderr))  # noqa: T201
    except BedError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    print(library)  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
