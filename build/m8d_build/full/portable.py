"""A built wheel made portable: library paths, libgomp, platform tag, marker, notice.

What the official build does after ``bdist_wheel`` (pytorch/builder, manywheel/build_common.sh) with patchelf
and zip is done here with patchelf and our own repacker; the marker says ``full``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from m8d_build.elf.read import compilers, glibc_floor, read_library
from m8d_build.errors import CheckFailed, PrerequisiteMissing, WheelInvalid
from m8d_build.proc import run
from m8d_build.wheel.changes import Put
from m8d_build.wheel.facts import cxx11_abi_of
from m8d_build.wheel.marking import topics_of, write_marked
from m8d_build.wheel.provenance import Origin, patch_inputs
from m8d_build.wheel.wheelfile import open_wheel
from multiworld.errors import MarkerError
from multiworld.shim.marker import Marker, compare, library_info

if TYPE_CHECKING:
    from collections.abc import Iterable

    from m8d_build.full.steps import FullPlan
    from m8d_build.series.read import Series
    from m8d_build.wheel.repack import Repacked
    from m8d_build.wheel.wheelfile import WheelFile
    from multiworld.provenance.statement import Resource

__all__ = ["Tools", "built_wheel", "finish_wheel", "platform_tag", "rpath_of", "shared_libraries"]

GOMP = "libgomp.so.1"
PATCHED = "torch/lib/libtorch_cuda.so"
BASE = "torch/lib/libc10.so"
LIBRARIES = PurePosixPath("torch/lib")
PACKAGE = PurePosixPath("torch")
_ASK_AGAIN = "Keep the log of the step before and report it"


@dataclass(frozen=True)
class Tools:
    """What finishing a wheel takes.

    Attributes:
        patchelf: its full path.
        gomp: the OpenMP runtime the libraries were linked with.
        builder: version of the toolchain.
    """

    patchelf: Path
    gomp: Path
    builder: str


def built_wheel(dist: Path) -> WheelFile:
    """Open the wheel a build left in a folder.

    Raises:
        WheelInvalid: there is none, or more than one, or it is damaged.
    """
    found = sorted(dist.glob("torch-*.whl"))
    if len(found) != 1:
        raise WheelInvalid(
            f"{dist} has {len(found)} wheels of torch", rule="the build leaves one", next_step=_ASK_AGAIN
        )
    return open_wheel(found[0])


def shared_libraries(names: Iterable[str]) -> tuple[str, ...]:
    """Return the entries whose library paths are ours to set: those in torch/lib and torch/ itself."""
    places = (LIBRARIES, PACKAGE)
    return tuple(n for n in names if PurePosixPath(n).parent in places and ".so" in PurePosixPath(n).suffixes)


def rpath_of(name: str, folders: Iterable[str]) -> str:
    """Return the library path an entry needs: NVIDIA's folders in site-packages, its own, and torch/lib.

    Args:
        name: entry in the wheel.
        folders: NVIDIA's, relative to site-packages.
    """
    parent = PurePosixPath(name).parent
    up = "/".join([".."] * len(parent.parts))
    own = ["$ORIGIN"] if parent == LIBRARIES else ["$ORIGIN", "$ORIGIN/lib"]
    return ":".join([*(f"$ORIGIN/{up}/{folder}" for folder in folders), *own])


def platform_tag(floors: Iterable[tuple[int, ...]]) -> str:
    """Return the platform tag for the glibc versions that libraries ask for."""
    newest = max((floor for floor in floors if any(floor)), default=())
    return f"manylinux_{newest[0]}_{newest[1]}_x86_64" if newest else "linux_x86_64"


def finish_wheel(
    plan: FullPlan,
    wheel: WheelFile,
    series: Series,
    tools: Tools,
    *,
    commit: str,
    inputs: Iterable[Resource],
    scratch: Path,
    log: Path,
) -> Repacked:
    """Check a built wheel and write the finished one into the plan's ``out``.

    Args:
        plan: what was built.
        wheel: what ``bdist_wheel`` left.
        series: the patches that were in its sources.
        tools: patchelf, libgomp, version.
        commit: of PyTorch's sources, as the target names it.
        inputs: files of these sources.
        scratch: a folder for unpacked libraries.
        log: where patchelf's output goes.

    Raises:
        CheckFailed: it is not what was planned: another version, commit or C++ ABI, or the patches are not
            in it.
        WheelInvalid: it is damaged.
        ElfInvalid: one of its libraries is.
        CommandFailed: patchelf failed.
        PrerequisiteMissing: patchelf or libgomp is not there.
        DiskFull, OutputUnwritable: there is no place for it.
    """
    stated = wheel.version_file()
    if stated.version != plan.version:
        raise CheckFailed(
            f"the built wheel is {stated.version}", rule=f"{plan.version} was built", next_step=_ASK_AGAIN
        )
    if plan.known_commit and commit and stated.git_version != commit:
        raise CheckFailed(
            f"the built wheel is of commit {stated.git_version}",
            rule=f"{commit} was built",
            next_step=_ASK_AGAIN,
        )
    marker = Marker(
        torch=plan.torch,
        local=plan.local,
        commit=stated.git_version,
        topics=topics_of(series),
        mode="full",
        builder=tools.builder,
        overlay=None,
    )
    changes: list[Put] = []
    floors: list[tuple[int, ...]] = []
    compiled_by: tuple[str, ...] = ()
    wants_gomp = False
    for name in shared_libraries(wheel.entries):
        path = _unpack(wheel, name, scratch)
        _check(plan, marker, name, path)
        if name == PATCHED:
            compiled_by = compilers(path)
        wants_gomp = wants_gomp or GOMP in read_library(path).needed
        rpath = rpath_of(name, plan.rpath)
        run(
            (_there(tools.patchelf, "patchelf"), "--force-rpath", "--set-rpath", rpath, path),
            what=f"set the library path of {name}",
            log=log,
        )
        floors.append(glibc_floor(path))
        changes.append(Put(name, path, executable=True))
    bundled = str(LIBRARIES / GOMP)
    if wants_gomp and bundled not in wheel.entries:
        gomp = _there(tools.gomp, GOMP)
        floors.append(glibc_floor(gomp))
        changes.append(Put(bundled, gomp, executable=True))
    return write_marked(
        wheel,
        plan.layout.out,
        changes,
        marker,
        origin=Origin(
            (*patch_inputs(series), *inputs),
            compiler="; ".join(compiled_by),
            unverified=() if plan.known_commit else ("pytorch",),
        ),
        platform=platform_tag(floors),
    )


def _unpack(wheel: WheelFile, name: str, scratch: Path) -> Path:
    path = scratch / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for block in wheel.blocks(name):
            file.write(block)
    return path


def _check(plan: FullPlan, marker: Marker, name: str, path: Path) -> None:
    """Check what only the library itself can tell."""
    if name == PATCHED:
        try:
            found = compare(marker, library_info(path), None)
        except MarkerError as exc:
            found = (str(exc),)
        if found:
            raise CheckFailed(
                "; ".join(found), rule="the library must carry the patches", next_step=_ASK_AGAIN
            )
    elif name == BASE:
        abi = cxx11_abi_of(path.read_bytes())
        if abi is not None and abi != plan.cxx11_abi:
            raise CheckFailed(
                f"{name} was compiled with _GLIBCXX_USE_CXX11_ABI={abi:d}",
                rule=f"the official wheel has {plan.cxx11_abi:d}",
                next_step=_ASK_AGAIN,
            )


def _there(path: Path, what: str) -> Path:
    if not path.exists():
        raise PrerequisiteMissing(
            f"no {what} at {path}",
            rule="finishing the wheel takes it",
            next_step="Make the environment anew with --fresh, or put it there",
        )
    return path
