"""All checks of an overlay: the new library can replace the old code, or the build stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.elf.read import read_library, read_object, read_symtab
from m8d_build.errors import CheckFailed, WheelMismatch
from m8d_build.files.blobs import blob_id
from m8d_build.overlay.graft import plan_graft
from m8d_build.overlay.headerguard import unguarded
from m8d_build.overlay.layouts import ClassProbe, same_layouts
from m8d_build.overlay.stale import no_stale_uses
from m8d_build.overlay.symbol_parity import strong_symbols_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from m8d_build.targets import Target
    from m8d_build.wheel.wheelfile import WheelFile

__all__ = ["ADDITIONS", "Candidate", "check_headers", "check_imports", "check_overlay"]

INCLUDE = "torch/include/"
HEADERS = (".h", ".hpp")
PYTHON = ".py"
# What patches add on purpose, and what our support unit brings; both are ours alone.
ADDITIONS = frozenset({"m8d_patch_info"})
# Classes that are made in one library and used in another; their headers are all among the targets' files.
CLASSES = (
    ClassProbe("c10d::ProcessGroupNCCL"),
    ClassProbe("c10d::ProcessGroupNCCL::WorkNCCL"),
    ClassProbe("c10d::ProcessGroupNCCL::Options"),
    ClassProbe("c10d::NCCLComm"),
    ClassProbe("torch::cuda::nccl::AutoNcclGroup"),
)
CLASS_HEADERS = ("torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp", "torch/csrc/cuda/nccl.h")


@dataclass(frozen=True)
class Candidate:
    """An overlay, before it is grafted.

    Attributes:
        units: the objects of the target's units, without our support unit.
        overlay: the library linked from them.
        library: libtorch_cuda.so as the official wheel has it.
        siblings: the wheel's other libraries.
        private: variables the overlay keeps to itself.
        accepted: old definitions that may go on being used, with the reason.
        patched_headers: headers the patches touch.
        official_include: the wheel's include folder.
        patched_include: the folder with the patched headers.
        compile_probe: compiles a source with a folder searched before all others.
    """

    units: Sequence[Path]
    overlay: Path
    library: Path
    siblings: Sequence[Path]
    private: Collection[str]
    accepted: Mapping[str, str]
    patched_headers: Sequence[str]
    official_include: Path
    patched_include: Path
    compile_probe: Callable[[str, Path], Path]


def check_overlay(candidate: Candidate) -> tuple[str, ...]:
    """Run every check; return one line for people about each.

    Raises:
        CheckFailed: the overlay is no drop-in.
        ElfInvalid: a file is damaged.
        AlreadyGrafted: the library is no official one.
    """
    objects = [read_object(path) for path in candidate.units]
    symtab = read_symtab(candidate.library)
    official = read_library(candidate.library)
    strong_symbols_equal(objects, symtab, official.exports, additions=ADDITIONS)
    strong = sum(1 for unit in objects for symbol in unit.definitions.values() if symbol.strong)
    said = [f"{strong} strong symbols are those of the wheel's own copy, and {', '.join(sorted(ADDITIONS))}"]
    check_imports(candidate.private, candidate.siblings)
    said.append(f"no other library uses the {len(candidate.private)} private variables")
    plan = plan_graft(official, read_library(candidate.overlay), candidate.overlay.name)
    no_stale_uses(candidate.library, symtab, objects, plan.hide, accepted=candidate.accepted)
    known = f", but for {len(candidate.accepted)} harmless ones on record" if candidate.accepted else ""
    said.append(f"no code outside the units reaches their old definitions directly{known}")
    if candidate.patched_headers:
        same_layouts(
            CLASS_HEADERS,
            CLASSES,
            candidate.compile_probe,
            official=candidate.official_include,
            patched=candidate.patched_include,
        )
        said.append(f"{len(CLASSES)} classes keep their layout under the patched headers")
    else:
        said.append("no header is patched: classes keep their layout")
    return tuple(said)


def check_headers(target: Target, wheel: WheelFile) -> int:
    """Check that the wheel's headers and Python files are the sources'; return how many were compared.

    Raises:
        WheelMismatch: one is not.
    """
    compared = 0
    for file in target.files:
        name = file.path if file.path.endswith(PYTHON) else INCLUDE + file.path
        if not file.blob or not file.path.endswith((*HEADERS, PYTHON)) or name not in wheel.entries:
            continue
        compared += 1
        found = blob_id(unguarded(wheel.read(name)))
        if found != file.blob:
            raise WheelMismatch(
                f"{name} of {wheel.path.name} has blob id {found}",
                rule=f"torch {target.version}'s sources have {file.blob}",
                next_step="This wheel was built from other sources; use the official one",
            )
    return compared


def check_imports(private: Collection[str], libraries: Iterable[Path]) -> None:
    """Check that no library uses a variable that the overlay keeps to itself: it would see the old copy.

    Raises:
        CheckFailed: one does.
    """
    for path in libraries:
        used = sorted(s.name for s in read_library(path).symbols if not s.defined and s.name in private)
        if used:
            raise CheckFailed(
                f"{path.name} uses {', '.join(used)}",
                rule="the overlay keeps variables that are constructed at load to itself",
                next_step="Build with --mode full",
            )
