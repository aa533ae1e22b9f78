"""Marker of a patched torch build: ``torch/m8d.json``, and a string in the rebuilt library.

Nothing here imports torch or loads a library: the JSON file is read, and the library's bytes are searched for
``m8d-patch-info:{...}`` followed by a NUL, which is what its exported ``m8d_patch_info()`` returns (without
the prefix). Both halves are written by the toolchain; ``Marker.disagreements`` says where they differ.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multiworld.errors import MarkerError

__all__ = [
    "LIBRARY_PREFIX", "MARKER_NAME", "OVERLAY_LIBRARY", "SCHEMA", "LibraryInfo", "Marker", "Overlay", "Topic",
    "compare", "find_torch", "library_info", "library_info_in", "parse_marker", "read_marker",
]  # fmt: skip

SCHEMA = 1
MARKER_NAME = "m8d.json"
OVERLAY_LIBRARY = "nccl.so.2"
LIBRARY_PREFIX = b"m8d-patch-info:"

_FULL_LIBRARY = "libtorch_cuda.so"
_LONGEST = 1 << 16  # a patch-info string is some hundred bytes
_REINSTALL = "Install the patched wheel again, or the official one"


@dataclass(frozen=True)
class Topic:
    """One patch topic of the build.

    Attributes:
        name: "group-guard".
        sha256: of the patch file, 64 hex digits.
    """

    name: str
    sha256: str


@dataclass(frozen=True)
class Overlay:
    """The library an overlay build added.

    Attributes:
        file: its path below the folder that holds ``torch`` ("torch/lib/nccl.so.2").
        sha256: of the file, 64 hex digits.
    """

    file: str
    sha256: str


@dataclass(frozen=True)
class LibraryInfo:
    """Patch info embedded in a rebuilt library.

    Attributes:
        torch: version of the sources, without a local label ("2.6.0").
        topics: names, in the order of the series.
    """

    torch: str
    topics: tuple[str, ...]


@dataclass(frozen=True)
class Marker:
    """Marker of a patched build.

    Attributes:
        torch: version without a local label ("2.6.0").
        local: local version label ("cu124.m8d2").
        commit: upstream commit of the sources, 40 hex digits.
        topics: in the order of the series.
        mode: "overlay" or "full".
        builder: version of the toolchain.
        overlay: the added library; None for a full build.
        ported_from: version whose patches were carried to this one by their text, not proven by hand; empty
            for a series of the version's own.
        disagreements: differences to the library on disk, one sentence each; empty without any, and where the
            library was not examined.
    """

    torch: str
    local: str
    commit: str
    topics: tuple[Topic, ...]
    mode: str
    builder: str
    overlay: Overlay | None
    ported_from: str = ""
    disagreements: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """Number of the build, of patches/targets.toml; 0 where the version had none."""
        found = re.search(r"(?:^|\.)m8d(\d+)", self.local)
        return int(found[1]) if found else 0

    @property
    def agrees(self) -> bool:
        """Whether no disagreement was found."""
        return not self.disagreements

    @property
    def library(self) -> str:
        """The library that must carry the patch info, below the folder that holds ``torch``."""
        return self.overlay.file if self.overlay else f"torch/lib/{_FULL_LIBRARY}"


def find_torch() -> Path:
    """Return the folder of the installed ``torch`` package, without importing it.

    Raises:
        MarkerError: torch is not installed.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise MarkerError("torch is not installed", next_step="Install it, or name its folder")
    return Path(next(iter(spec.submodule_search_locations)))


def read_marker(torch_dir: Path | None = None, *, check_library: bool = True) -> Marker | None:
    """Read the marker of an installed torch.

    Args:
        torch_dir: the folder of the ``torch`` package; found by ``find_torch`` if None.
        check_library: also compare the library on disk. An overlay library is small; in a full build
            libtorch_cuda.so is searched, which takes a second or more.

    Returns:
        The marker, with its disagreements; None for a torch that is not patched.

    Raises:
        MarkerError: torch is not installed, the JSON is unreadable or of another schema, or it is missing
            although the overlay library is there.
    """
    folder = find_torch() if torch_dir is None else torch_dir
    path = folder / MARKER_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        overlay = folder / "lib" / OVERLAY_LIBRARY
        if library_info(overlay) is None:
            return None
        raise MarkerError(
            f"{overlay} is a patched library, but there is no {path}",
            rule="a patched torch has both",
            next_step=_REINSTALL,
        ) from None
    except OSError as exc:
        raise MarkerError(f"{path} cannot be read: {exc.strerror}", next_step=_REINSTALL) from exc
    marker = parse_marker(data, where=str(path))
    if not check_library:
        return marker
    return replace(marker, disagreements=_compare_on_disk(marker, folder.parent / marker.library))


def parse_marker(data: bytes, *, where: str = MARKER_NAME) -> Marker:
    """Parse the bytes of ``torch/m8d.json``. Unknown keys are ignored; an unknown schema is not.

    Raises:
        MarkerError: they are no JSON, of another schema, or lack a field.
    """
    try:
        raw: Any = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise MarkerError(f"{where} is no JSON: {exc}", next_step=_REINSTALL) from exc
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise MarkerError(
            f"{where} has schema {schema!r}",
            rule=f"this multiworld reads schema {SCHEMA}",
            next_step="Update multiworld",
        )
    try:
        overlay = raw["overlay"]
        marker = Marker(
            torch=_text(raw, "torch"),
            local=_text(raw, "local"),
            commit=_text(raw, "commit"),
            topics=tuple(Topic(_text(topic, "name"), _text(topic, "sha256")) for topic in raw["topics"]),
            mode=_text(raw, "mode"),
            builder=_text(raw, "builder"),
            overlay=None if overlay is None else Overlay(_text(overlay, "file"), _text(overlay, "sha256")),
            ported_from=_text(raw, "ported_from") if "ported_from" in raw else "",
        )
        _check_mode(marker)
    except (KeyError, TypeError, ValueError) as exc:
        raise MarkerError(
            f"{where} breaks the schema: {type(exc).__name__}: {exc}", next_step=_REINSTALL
        ) from exc
    return marker


def library_info(path: Path) -> LibraryInfo | None:
    """Return what a library says of its patches; None if there is no such file or it says nothing.

    The file is mapped and searched, not loaded.

    Raises:
        MarkerError: it cannot be read, or carries the prefix with something unreadable behind it.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return None  # an empty file cannot be mapped
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return library_info_in(data, where=str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise MarkerError(f"{path} cannot be read: {exc.strerror}", next_step=_REINSTALL) from exc


def library_info_in(data: bytes | mmap.mmap, *, where: str) -> LibraryInfo | None:
    """Return the patch info in a library's bytes, None if there is none.

    Raises:
        MarkerError: it is there but unreadable, or there are two that differ.
    """
    found: set[bytes] = set()
    start = data.find(LIBRARY_PREFIX + b"{")
    while start >= 0:
        begin = start + len(LIBRARY_PREFIX)
        end = data.find(b"\0", begin, begin + _LONGEST)
        if end < 0:
            raise MarkerError(f"{where}: the patch info has no end", next_step=_REINSTALL)
        found.add(data[begin:end])
        start = data.find(LIBRARY_PREFIX + b"{", end)
    if not found:
        return None
    if len(found) > 1:
        raise MarkerError(f"{where} carries {len(found)} patch infos that differ", next_step=_REINSTALL)
    try:
        raw: Any = json.loads(found.pop())
        return _info(raw)
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise MarkerError(
            f"{where}: the patch info is unreadable: {type(exc).__name__}: {exc}", next_step=_REINSTALL
        ) from exc


def compare(marker: Marker, info: LibraryInfo | None, sha256: str | None) -> tuple[str, ...]:
    """Return where a marker and the library it names differ, one sentence each.

    Args:
        marker: what ``torch/m8d.json`` says.
        info: what the library says, None if it says nothing.
        sha256: of an overlay library's file, 64 hex digits; None if it was not computed.
    """
    name = marker.library.rpartition("/")[2]
    if info is None:
        return (f"{name} says nothing of patches",)
    found = []
    if info.torch != marker.torch:
        found.append(f"{name} is of torch {info.torch}, {MARKER_NAME} says {marker.torch}")
    named = tuple(topic.name for topic in marker.topics)
    if info.topics != named:
        found.append(
            f"{name} has the topics {', '.join(info.topics) or 'none'}; "
            f"{MARKER_NAME} says {', '.join(named) or 'none'}"
        )
    if marker.overlay is not None and sha256 is not None and sha256 != marker.overlay.sha256:
        found.append(f"{name} has the SHA-256 {sha256}, {MARKER_NAME} says {marker.overlay.sha256}")
    return tuple(found)


def _compare_on_disk(marker: Marker, library: Path) -> tuple[str, ...]:
    if not library.is_file():
        return (f"{library} is missing",)
    try:
        info = library_info(library)
    except MarkerError as exc:
        return (str(exc),)
    digest = hashlib.sha256(library.read_bytes()).hexdigest() if marker.overlay is not None else None
    return compare(marker, info, digest)


def _check_mode(marker: Marker) -> None:
    overlay = marker.overlay
    if marker.mode not in {"overlay", "full"} or (marker.mode == "overlay") != (overlay is not None):
        raise ValueError(f"mode {marker.mode!r} with overlay {overlay!r}")
    if overlay and (overlay.file.startswith("/") or ".." in overlay.file.split("/")):
        raise ValueError(f"overlay file {overlay.file!r} leaves the installation")


def _info(raw: Any) -> LibraryInfo:
    if raw["schema"] != SCHEMA:
        raise ValueError(f"schema {raw['schema']!r}, this multiworld reads {SCHEMA}")
    topics = raw["topics"]
    if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
        raise TypeError(f"topics are {topics!r}, must be names")
    return LibraryInfo(_text(raw, "torch"), tuple(topics))


def _text(raw: Any, key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is {value!r}, must be a string")
    return value
