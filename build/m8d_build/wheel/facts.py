"""Facts of an official torch wheel: versions, ABI, compiler flags, pinned packages, glibc floor.

Read from the wheel's files; torch is not imported and nothing of it is run. Whatever can be read in two
places is read in both and compared.
"""

from __future__ import annotations

import mmap
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from m8d_build.elf.read import glibc_floor
from m8d_build.errors import WheelInvalid, WheelMismatch
from m8d_build.files.disk import needs_room
from m8d_build.targets import Abi

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from m8d_build.targets import Target
    from m8d_build.wheel.wheelfile import WheelFile

__all__ = ["WheelFacts", "WheelLibrary", "cxx11_abi_of", "pinned_requirements", "read_facts"]

LIBRARIES = "torch/lib/"
CMAKE = "torch/share/cmake/Torch/TorchConfig.cmake"
BLOCK = 4 << 20

# c10::detail::torchCheckFail(const char*, const char*, unsigned, const std::string&), exported by libc10.so
# since torch 1.8: its mangled name says which std::string it takes.
_CHECK_FAIL = b"_ZN3c106detail14torchCheckFailEPKcS2_j"
_OLD_STRING = _CHECK_FAIL + b"RKSs\0"
_NEW_STRING = _CHECK_FAIL + b"RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE\0"

# caffe2/core/macros.h.in: the build's CXX_FLAGS stand in libtorch_cpu.so for torch.__config__.show().
_ABI_DEFINE = b"-D_GLIBCXX_USE_CXX11_ABI="
_PYBIND_ABI = re.compile(rb"__pybind11_internals_v\d+(_[A-Za-z0-9_]+?)__(?:@|\0)")
_LONGEST = 1 << 14


@dataclass(frozen=True)
class WheelLibrary:
    """One shared library of the wheel.

    Attributes:
        name: entry in the wheel ("torch/lib/libc10.so").
        size: unpacked, in bytes.
        glibc: oldest glibc it can be loaded with, as (2, 17); (0, 0) if it asks for none.
    """

    name: str
    size: int
    glibc: tuple[int, ...]


@dataclass(frozen=True)
class WheelFacts:
    """What was found in the wheel.

    Attributes:
        torch: version without a local label ("2.6.0").
        local: local label of torch/version.py ("cu124"); PyPI's file names leave it out.
        cuda: CUDA version ("12.4"), "" for a CPU build.
        git_version: upstream commit, 40 hex digits.
        python_tag, abi_tag: of the file name ("cp311").
        platforms: of the file name.
        abi: how C++ was compiled: the std::string ABI, ``-fabi-version`` (0 if none was given), the language
            standard, CUDA. What the compiler is told.
        cxx_flags: the official build's flags, as ``torch.__config__.show()`` prints them.
        pybind_abi: what pybind11 puts into the names of shared state ("_gcc_libstdcpp_cxxabi1011"), "" if it
            was not found.
        nccl: version of the NCCL package METADATA pins, "" if it pins none.
        requirements: packages METADATA pins with ==, name to version.
        glibc: oldest glibc all its libraries can be loaded with.
        libraries: those in torch/lib, by name.
    """

    torch: str
    local: str
    cuda: str
    git_version: str
    python_tag: str
    abi_tag: str
    platforms: tuple[str, ...]
    abi: Abi
    cxx_flags: str
    pybind_abi: str
    nccl: str
    requirements: Mapping[str, str]
    glibc: tuple[int, ...]
    libraries: tuple[WheelLibrary, ...]

    def check_against(self, target: Target) -> None:
        """Compare with what the target records of the official build.

        Raises:
            WheelMismatch: a value differs; the message names both. A target without an ``abi`` passes.
        """
        if target.abi is None:
            return
        for key in ("cxx11_abi", "abi_version", "std", "cuda"):
            found, wanted = getattr(self.abi, key), getattr(target.abi, key)
            if found != wanted:
                raise WheelMismatch(
                    f"the wheel of torch {self.torch}+{self.local} has {key} {found}",
                    rule=f"targets.toml says {key} {wanted} for {target.version}",
                    next_step="Give the target's official wheel, or correct the entry if it is wrong",
                )


def read_facts(wheel: WheelFile, *, scratch: Path | None = None, installed: Path | None = None) -> WheelFacts:
    """Read the facts of an official wheel; about 15 s, most of it unpacking libraries one at a time.

    Args:
        wheel: the official wheel.
        scratch: folder to unpack a library in (at most the largest one's size); the system's if None.
        installed: a folder that already holds this wheel unpacked (``torch/lib`` below it); nothing is
            unpacked then. Its libraries must have the sizes the wheel gives.

    Raises:
        WheelInvalid: something a torch wheel has is missing or damaged.
        WheelMismatch: two places in the wheel say different things.
        ElfInvalid: a library is damaged.
        DiskFull: no room to unpack one.
    """
    version = wheel.version_file()
    names = sorted(
        name for name in wheel.entries if name.startswith(LIBRARIES) and ".so" in PurePosixPath(name).name
    )
    cxx11: bool | None = None
    flags, pybind = "", ""
    libraries = []
    for name in names:
        with _library(wheel, name, scratch, installed) as path, _mapped(path) as data:
            libraries.append(WheelLibrary(name, len(data), glibc_floor(path)))
            if name.endswith("/libc10.so"):
                cxx11 = cxx11_abi_of(data)
            elif name.endswith("/libtorch_cpu.so"):
                flags = _flags_in(data)
            elif name.endswith("/libtorch_python.so"):
                pybind = _pybind_in(data)
    if cxx11 is None:
        raise _lacks(wheel, "a libc10.so that exports c10::detail::torchCheckFail")
    cmake = wheel.read(CMAKE).decode(errors="replace")
    _agree(wheel, "_GLIBCXX_USE_CXX11_ABI", {"libc10.so": str(int(cxx11)), **_stated_abi(flags, cmake)})
    standard = re.search(r"CXX_STANDARD\s+(\d\d)\b", cmake)
    if standard is None:
        raise _lacks(wheel, f"a CXX_STANDARD in {CMAKE}")
    given = re.search(r"(?:^|\s)-fabi-version=(\d+)", flags)
    requirements = pinned_requirements(wheel)
    return WheelFacts(
        torch=version.version.partition("+")[0],
        local=version.local,
        cuda=version.cuda or "",
        git_version=version.git_version,
        python_tag=".".join(wheel.python_tags),
        abi_tag=".".join(wheel.abi_tags),
        platforms=wheel.platforms,
        abi=Abi(cxx11, int(given[1]) if given else 0, f"gnu++{standard[1]}", version.cuda or ""),
        cxx_flags=flags,
        pybind_abi=pybind,
        nccl=next((v for name, v in requirements.items() if name.startswith("nvidia-nccl-")), ""),
        requirements=MappingProxyType(requirements),
        glibc=max((library.glibc for library in libraries), default=(0, 0)),
        libraries=tuple(libraries),
    )


def cxx11_abi_of(libc10: bytes | mmap.mmap) -> bool | None:
    """Return whether a libc10.so was compiled with the new std::string, None if its symbols do not say.

    Args:
        libc10: the library's bytes.
    """
    old, new = libc10.find(_OLD_STRING) >= 0, libc10.find(_NEW_STRING) >= 0
    return new if old != new else None


def pinned_requirements(wheel: WheelFile) -> dict[str, str]:
    """Return the packages METADATA pins with ==, normalised name to version, in its order.

    Raises:
        WheelInvalid: a requirement cannot be read.
    """
    pinned: dict[str, str] = {}
    for text in wheel.headers("METADATA").get_all("Requires-Dist") or []:
        try:
            requirement = Requirement(str(text))
        except InvalidRequirement as exc:
            raise WheelInvalid(
                f"{wheel.path}: METADATA requires {text!r}",
                rule=str(exc),
                next_step="Download the wheel again",
            ) from exc
        specifiers = list(requirement.specifier)
        if len(specifiers) == 1 and specifiers[0].operator == "==":
            pinned[canonicalize_name(requirement.name)] = specifiers[0].version
    return pinned


@contextmanager
def _library(wheel: WheelFile, name: str, scratch: Path | None, installed: Path | None) -> Iterator[Path]:
    """Give a library as a file: the installed one, or one unpacked for as long as it is looked at."""
    size = wheel.entries[name].file_size
    if installed is not None:
        path = installed / name
        if not path.is_file() or path.stat().st_size != size:
            raise WheelInvalid(
                f"{path} is not the wheel's",
                rule=f"{name} has {size} bytes",
                next_step="Unpack the wheel anew",
            )
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="facts-", dir=scratch) as folder:
        path = Path(folder) / PurePosixPath(name).name
        with needs_room(Path(folder), f"unpacking {name}"), path.open("wb") as file:
            for block in wheel.blocks(name, BLOCK):
                file.write(block)
        yield path


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    if path.stat().st_size == 0:
        raise WheelInvalid(
            f"{path.name} is empty", rule="it must be a library", next_step="Download the wheel again"
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _flags_in(libtorch_cpu: mmap.mmap) -> str:
    """Return the NUL-terminated string with the ABI define, "" if there is none."""
    at = libtorch_cpu.find(_ABI_DEFINE)
    if at < 0:
        return ""
    begin = libtorch_cpu.rfind(b"\0", max(0, at - _LONGEST), at) + 1
    end = libtorch_cpu.find(b"\0", at, at + _LONGEST)
    return libtorch_cpu[begin : max(end, at)].decode(errors="replace").strip()


def _pybind_in(libtorch_python: mmap.mmap) -> str:
    found = _PYBIND_ABI.search(libtorch_python)
    return found[1].decode() if found else ""


def _stated_abi(flags: str, cmake: str) -> dict[str, str]:
    """Return what compiler flags in libtorch_cpu.so and in TorchConfig.cmake say, where they say it."""
    stated = {}
    for where, text in (("libtorch_cpu.so", flags), (CMAKE, cmake)):
        if found := re.search(r"-D_GLIBCXX_USE_CXX11_ABI=([01])\b", text):
            stated[where] = found[1]
    return stated


def _agree(wheel: WheelFile, what: str, stated: Mapping[str, str]) -> None:
    if len(set(stated.values())) > 1:
        raise WheelMismatch(
            f"{wheel.path.name}: {what} is "
            + ", ".join(f"{value} in {where}" for where, value in stated.items()),
            rule="one build has one ABI",
            next_step="Give an official wheel",
        )


def _lacks(wheel: WheelFile, what: str) -> WheelInvalid:
    return WheelInvalid(
        f"{wheel.path} lacks {what}",
        rule="an official torch wheel has it",
        next_step="Give an official wheel",
    )
