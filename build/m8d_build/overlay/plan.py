"""The overlay build, planned: flags, commands, steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from m8d_build.errors import UnknownVersion
from m8d_build.targets import Unit
from m8d_build.wheel.label import local_label

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.overlay.toolbox import Toolbox
    from m8d_build.series.read import Series
    from m8d_build.targets import Abi, Target

__all__ = [
    "CompileJob",
    "Layout",
    "Step",
    "compile_flags",
    "compile_jobs",
    "describe",
    "link_command",
    "next_to_start",
    "overlay_file_name",
    "overlay_rpath", "require_recipe",
]  # fmt: skip

UNKNOWN_MB = 1000  # assumed for a unit whose compiler was not measured

# How the official build compiles these units, beyond what it says of itself: CMakeLists.txt,
# caffe2/CMakeLists.txt and cmake/Dependencies.cmake of 2.6.0; the same names up to 2.14. 2.6.0's units do not
# use fmt, later ones do.
_DEFINES = (
    "USE_C10D_NCCL", "USE_C10D_GLOO", "USE_DISTRIBUTED", "USE_CUDA", "USE_NCCL", "USE_RPC", "USE_TENSORPIPE",
    "TORCH_CUDA_BUILD_MAIN_LIB", "torch_cuda_EXPORTS", "NDEBUG", "FMT_HEADER_ONLY=1",
)  # fmt: skip


class Step(Enum):
    """The steps of an overlay build, in order: the build runs them, progress and plan show them.

    Attributes:
        title: as people see it.
        seconds: on 2 cores with downloads cached, measured on torch 2.6.0+cu124; only to estimate what is
            left.
    """

    OFFICIAL_WHEEL = "official wheel", 2.0
    SOURCES = "sources", 1.0
    PATCHES = "patches", 0.5
    HEADERS = "headers", 5.0
    LIBRARIES = "libraries", 11.0
    COMPILE = "compile", 80.0
    LINK = "link", 5.0
    CHECK = "check", 9.0
    GRAFT = "graft", 2.0
    REPACK = "repack", 37.0
    INSPECT = "inspect", 0.5

    def __init__(self, title: str, seconds: float) -> None:
        self.title = title
        self.seconds = seconds

    @classmethod
    def expected(cls) -> tuple[tuple[str, float], ...]:
        """Return (title, seconds) of each step, for `Progress`."""
        return tuple((step.title, step.seconds) for step in cls)


@dataclass(frozen=True)
class Layout:
    """Folders of one build.

    Attributes:
        stage: patched files, in PyTorch's layout; searched first, so a patched header wins.
        source: PyTorch's tree; searched last, for the few headers the wheel does not ship.
        work: objects and the library before they are moved to their place.
    """

    stage: Path
    source: Path
    work: Path


@dataclass(frozen=True)
class CompileJob:
    """One compiler call.

    Attributes:
        unit: the source's path in PyTorch's layout ("native/overlay.cpp" for our own).
        source: the file that is compiled.
        flags: every argument but source, output and dependency file.
        identity: what makes the object, apart from the bytes it reads: the flags without this machine's
            paths.
        memory_mb: what the compiler will need, 0 if unknown.
    """

    unit: str
    source: Path
    flags: tuple[str, ...]
    identity: tuple[str, ...]
    memory_mb: int = 0

    @property
    def name(self) -> str:
        """File name of the object, unique within a build."""
        return PurePosixPath(self.unit).with_suffix(".o").as_posix().replace("/", "_")


def compile_flags(abi: Abi) -> tuple[str, ...]:
    """Return the flags that do not depend on folders.

    Args:
        abi: as the official wheel was compiled (read from the wheel).
    """
    flags = [
        f"-std={abi.std}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(abi.cxx11_abi)}",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-fvisibility-inlines-hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-w",  # warnings about PyTorch's own code are not ours to act on
    ]
    if abi.abi_version:
        flags.append(f"-fabi-version={abi.abi_version}")
    return (*flags, *(f"-D{name}" for name in _DEFINES))


def compile_jobs(
    units: Sequence[Unit], native: Path, abi: Abi, toolbox: Toolbox, layout: Layout
) -> tuple[CompileJob, ...]:
    """Return the compiler calls of a build: the target's units, then our own support unit.

    Units that no patch touches are compiled from the source tree.
    """
    base = compile_flags(abi)
    include = toolbox.torch_include
    searched = [
        f"-I{layout.stage}",
        f"-I{include}",
        f"-I{include}/torch/csrc/api/include",
        *(arg for folder in toolbox.system_includes for arg in ("-isystem", str(folder))),
        "-idirafter",
        str(layout.source),
    ]
    # __FILE__ stands in NCCL's error messages: name PyTorch's files there, not this machine's folders.
    prefixes = [
        f"-ffile-prefix-map={folder}=." for folder in (layout.stage, layout.source, include, native.parent)
    ]
    jobs = []
    support = Unit(f"native/{native.name}", _all_defines(units), memory_mb=100)
    for unit in (*units, support):
        path = unit.path
        staged = layout.stage / path
        source = (
            native if path.startswith("native/") else staged if staged.is_file() else layout.source / path
        )
        own = tuple(f"-D{define}" for define in unit.defines)
        flags = (*base, *own, *searched, *prefixes)
        jobs.append(CompileJob(path, source, flags, (*base, *own), unit.memory_mb))
    return tuple(jobs)


def next_to_start(waiting: Sequence[int], running: Sequence[int], budget_mb: int) -> int | None:
    """Return which of the waiting compilers to start now, None to wait for one that runs.

    Args:
        waiting: what each needs in MB, in the order they are wanted; 0 if unknown, taken for UNKNOWN_MB.
        running: same of those that run.
        budget_mb: memory they may take together. One always runs, whatever it needs.

    Returns:
        An index into ``waiting``.
    """
    taken = sum(need or UNKNOWN_MB for need in running)
    for index, need in enumerate(waiting):
        if not running or taken + (need or UNKNOWN_MB) <= budget_mb:
            return index
    return None


def _all_defines(units: Sequence[Unit]) -> tuple[str, ...]:
    """Our support unit declares what some units were made to call by another name: it sees every define."""
    return tuple(dict.fromkeys(d for unit in units for d in unit.defines))


def link_command(
    compiler: str,
    objects: Sequence[Path],
    libraries: Sequence[Path],
    version_script: Path,
    file_name: str,
    rpath: str,
    output: Path,
) -> tuple[str, ...]:
    """Return the command that makes the overlay library.

    Args:
        compiler: the C++ compiler.
        objects: in the order of the units.
        libraries: what it is linked against, by path.
        version_script: which symbols it exports.
        file_name: its DT_SONAME.
        rpath: where it finds its neighbours, relative to itself.
        output: the library.
    """
    return (
        compiler,
        "-shared",
        "-fPIC",
        "-O2",
        "-o",
        str(output),
        *map(str, objects),
        f"-Wl,-soname,{file_name}",
        *("-Xlinker", f"--version-script={version_script}"),  # not -Wl: a comma in the path would part it
        "-Wl,--disable-new-dtags",  # DT_RPATH, as the official libraries have
        f"-Wl,-rpath,{rpath}",
        "-Wl,-z,defs",
        "-Wl,-z,relro",
        "-Wl,-z,now",
        "-Wl,--build-id=sha1",
        "-Wl,--no-as-needed",
        *map(str, libraries),
        "-lpthread",
        "-ldl",
    )


def overlay_file_name(strings: Sequence[str]) -> str:
    """Return the overlay's file name: a proper suffix of a NEEDED entry that names NCCL.

    The name must stand in the grafted library's string table already, so that nothing has to grow.

    Args:
        strings: NEEDED entries of libtorch_cuda.so.

    Raises:
        ValueError: none of them names NCCL.
    """
    for name in strings:
        if name.startswith("libnccl.so"):
            return name.removeprefix("lib")
    raise ValueError(f"no NEEDED entry names NCCL: {', '.join(strings)}")


def overlay_rpath(official: str) -> str:
    """Return the overlay's DT_RPATH: its own folder, then the official library's paths."""
    entries = ["$ORIGIN", *(e for e in official.split(":") if e and e != "$ORIGIN")]
    return ":".join(dict.fromkeys(entries))


def require_recipe(target: Target) -> None:
    """Check that an overlay of this target can be built at all.

    Raises:
        UnknownVersion: it has no units on record.
    """
    if not target.units:
        raise UnknownVersion(
            f"torch {target.version} cannot be built yet (status {target.status.value}: "
            f"{target.note or 'no note'})",
            rule="a target that is built names its units and patches",
            next_step="`nox -s m8d -- targets` shows which versions can; docs/patching.md says how to add "
            "one",
        )


def describe(target: Target, python: str, source: str, series: Series, jobs: int) -> dict[str, str]:
    """Return what each step of an overlay build does, for people, from what is on record.

    Args:
        target: the version.
        python: Python tag of the wheel.
        source: as given with ``--source``.
        series: the patches.
        jobs: compilers side by side.
    """
    official = next((w.filename for w in target.wheels if f"-{python}-" in w.filename), "")
    flags = " ".join(compile_flags(target.abi)) if target.abi else "as the wheel says"
    places = "the cache, git, the distribution's source package" if source == "auto" else source
    done = {
        Step.OFFICIAL_WHEEL: official or f"none on record for {python}: name one with --wheel",
        Step.SOURCES: f"PyTorch {target.tag} from {places}; {len(target.files)} files checked by blob id",
        Step.PATCHES: ", ".join(series.topics) or "none",
        Step.HEADERS: ", ".join((*target.pinned_packages, *target.build_packages)) or "none on record",
        Step.LIBRARIES: "torch/lib of the official wheel, unpacked for the time of the build",
        Step.COMPILE: f"{', '.join(unit.path for unit in target.units) or 'no units on record'}; {jobs} at "
        f"once; {flags}",
        Step.LINK: "one library with the name of NCCL's own without its lib prefix",
        Step.CHECK: "strong symbols, class sizes, direct calls",
        Step.GRAFT: "torch/lib/libtorch_cuda.so: one DT_NEEDED more, the old definitions hidden",
        Step.REPACK: f"torch-{target.version}+{local_label(_local(target), target, series.digest)}",
        Step.INSPECT: "marker, METADATA, RECORD, libraries and file name agree",
    }
    return {step.title: done[step] for step in Step}


def _local(target: Target) -> str:
    return next((wheel.local for wheel in target.wheels), "")
