"""Headers and libraries that an overlay is compiled and linked against, unpacked from wheels.

Nothing is installed. Headers go to the cache, named by what they came from; the libraries (over a gigabyte)
are unpacked for as long as a build needs them.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from m8d_build.errors import DiskFull, PrerequisiteMissing, WheelInvalid
from m8d_build.files.cachedir import mark_used
from multiworld.provenance.wheel import BROKEN_ZIP, of_damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["Toolbox", "extract", "link_libraries", "prepare_headers", "required_packages"]

# libtorch_cuda.so's neighbours that the units' symbols live in (2.6.0 to 2.14: the same four).
TORCH_LIBRARIES = ("libtorch_cuda.so", "libtorch_cpu.so", "libc10_cuda.so", "libc10.so")
TORCH_INCLUDE = "torch/include/"
COPY_CHUNK = 4 << 20


@dataclass(frozen=True)
class Toolbox:
    """Folders of one build's headers.

    Attributes:
        torch_include: the official wheel's ``torch/include``.
        system_includes: include folders of the other packages, in the order of the command line.
        identity: digest of all these headers; part of each object's cache key.
    """

    torch_include: Path
    system_includes: tuple[Path, ...]
    identity: str


def required_packages(
    pinned: Iterable[str], extra: Iterable[str], requirements: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the packages with headers, as "name==version".

    Args:
        pinned: names whose version the official wheel's METADATA pins.
        extra: "name==version" of the others.
        requirements: what METADATA pins, name to version.

    Raises:
        PrerequisiteMissing: METADATA does not pin one of ``pinned``.
    """
    lacking = [name for name in pinned if name not in requirements]
    if lacking:
        raise PrerequisiteMissing(
            f"the official wheel does not pin {', '.join(lacking)}",
            rule="targets.toml says that their headers are needed",
            next_step="Correct pinned_packages of this target in patches/targets.toml",
        )
    return tuple(f"{name}=={requirements[name]}" for name in pinned) + tuple(extra)


def prepare_headers(torch_wheel: Path, package_wheels: Mapping[str, Path], cache: Path) -> Toolbox:
    """Unpack every header a build needs, once.

    Args:
        torch_wheel: the official wheel.
        package_wheels: "name==version" to that package's wheel.
        cache: the cache folder.

    Raises:
        WheelInvalid: a wheel is damaged.
        PrerequisiteMissing: a package's wheel has no headers.
        DiskFull: no room.
    """
    # By what the headers are, not by the wheel: those for several Pythons have the same, and share their
    # objects. Nor by its name, which another file may have had before.
    own = _headers_digest(torch_wheel, _is_torch_header)
    torch_root = cache / "headers" / f"torch-{own[:32]}"
    _once(torch_root, lambda into: extract(torch_wheel, into, _is_torch_header))
    includes: list[Path] = []
    packages = []
    for requirement, wheel in package_wheels.items():
        digest = _headers_digest(wheel, _is_header)
        packages.append(f"{wheel.name} {digest}")
        root = cache / "headers" / f"{wheel.stem}-{digest[:32]}"
        _once(root, lambda into, wheel=wheel: extract(wheel, into, _is_header))  # type: ignore[misc]
        found = sorted(
            path for path in root.rglob("include") if path.is_dir() and "include" not in path.parent.parts
        )
        if not found:
            raise PrerequisiteMissing(
                f"{requirement} ({wheel.name}) has no include folder",
                rule="targets.toml says that its headers are needed",
                next_step="Correct build_packages or pinned_packages of this target",
            )
        includes += found
    identity = sha256("\n".join([own, *sorted(packages)]).encode())
    return Toolbox(torch_root / "torch" / "include", tuple(includes), identity.hexdigest())


def link_libraries(
    torch_lib: Path, package_wheels: Iterable[Path], needed: Iterable[str], into: Path
) -> tuple[Path, ...]:
    """Return the libraries an overlay is linked against, unpacking what is not PyTorch's own.

    Args:
        torch_lib: the official wheel's ``torch/lib``, unpacked.
        package_wheels: wheels that hold the others.
        needed: file names of the others (NEEDED entries of libtorch_cuda.so).
        into: where those go; the caller removes it after use.

    Raises:
        WheelInvalid: a wheel is damaged, or the official one lacks a library.
        PrerequisiteMissing: no package has one of the others.
        DiskFull: no room.
    """
    into.mkdir(parents=True, exist_ok=True)
    missing = dict.fromkeys(needed)
    found = [torch_lib / name for name in TORCH_LIBRARIES]
    lacking = [path.name for path in found if not path.is_file()]
    if lacking:
        raise WheelInvalid(
            f"the official wheel has no torch/lib/{', torch/lib/'.join(lacking)}",
            rule="an overlay needs a CUDA build of torch",
            next_step="Use the official CUDA wheel that `python -m m8d_build targets` names",
        )
    for wheel in package_wheels:
        with _opened(wheel) as archive:
            for member in archive.namelist():
                name = PurePosixPath(member).name
                if name in missing:
                    _copy_member(archive, member, into / name)
                    found.append(into / name)
                    del missing[name]
    if missing:
        raise PrerequisiteMissing(
            f"none of the packages has {', '.join(missing)}",
            rule="libtorch_cuda.so needs it, so its package must be among pinned_packages",
            next_step="Correct pinned_packages of this target in patches/targets.toml",
        )
    return tuple(found)


def extract(wheel: Path, into: Path, wanted: Callable[[str], bool], *, jobs: int = 1) -> int:
    """Unpack the members of a wheel that ``wanted`` accepts; return how many.

    Args:
        wheel: the file.
        into: the folder.
        wanted: told a member's name.
        jobs: members unpacked side by side (inflating does not hold the interpreter); the largest first.

    Raises:
        WheelInvalid: the wheel is damaged.
        DiskFull: no room.
    """
    with _opened(wheel) as archive:
        chosen = [m for m in archive.infolist() if not m.is_dir() and wanted(m.filename)]
        for member in chosen:
            if ".." in PurePosixPath(member.filename).parts or PurePosixPath(member.filename).is_absolute():
                raise WheelInvalid(
                    f"{wheel.name} has a member {member.filename!r}",
                    rule="members must stay inside the wheel",
                    next_step="Do not use this file",
                )
            (into / member.filename).parent.mkdir(parents=True, exist_ok=True)
        chosen.sort(key=lambda member: member.file_size, reverse=True)
        with ThreadPoolExecutor(max_workers=max(1, jobs), thread_name_prefix="m8d-unzip") as pool:
            made = [pool.submit(_copy_member, archive, m.filename, into / m.filename) for m in chosen]
            try:
                for future in made:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)
    return len(chosen)


def _headers_digest(wheel: Path, wanted: Callable[[str], bool]) -> str:
    """Digest names and contents of a wheel's headers (half a second): its directory has only CRCs of them."""
    with _opened(wheel) as archive:
        entries = [
            f"{m.filename} {sha256(archive.read(m)).hexdigest()}"
            for m in archive.infolist()
            if wanted(m.filename)
        ]
    return sha256("\n".join(sorted(entries)).encode()).hexdigest()


def _is_torch_header(name: str) -> bool:
    return name.startswith(TORCH_INCLUDE)


def _is_header(name: str) -> bool:
    return "/include/" in name


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (*BROKEN_ZIP, OSError) as exc:
        if not isinstance(exc, FileNotFoundError) and not of_damage(exc):
            raise
        raise WheelInvalid(
            f"{wheel} cannot be read: {exc}",
            rule="it must be a whole wheel",
            next_step="Remove it and run again",
        ) from exc


def _copy_member(archive: zipfile.ZipFile, member: str, target: Path) -> None:
    partial = target.with_name(f".{target.name}.part")
    try:
        with archive.open(member) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, COPY_CHUNK)
        partial.replace(target)
    except OSError as exc:
        if exc.errno == errno.ENOSPC:
            raise DiskFull(
                f"no room left for {target}", next_step="Free some space or set M8D_CACHE to another disk"
            ) from exc
        raise
    finally:
        partial.unlink(missing_ok=True)


def _once(folder: Path, fill: Callable[[Path], object]) -> None:
    """Make ``folder`` whole or not at all; a finished one is reused."""
    if folder.is_dir():
        mark_used(folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(partial)
        try:
            partial.rename(folder)
        except OSError as exc:
            if exc.errno not in (
                errno.ENOTEMPTY,
                errno.EEXIST,
            ):  # another build was faster: the same contents
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
