"""Inspection of a wheel: marker, topics, symbol bindings, and whether they agree."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from m8d_build.elf.read import read_library
from m8d_build.elf.symbols import LINKER_SYMBOLS
from m8d_build.errors import WheelInvalid
from m8d_build.files.disk import needs_room
from m8d_build.series.read import load_series
from m8d_build.wheel.changes import BLOCK
from m8d_build.wheel.provenance import UNVERIFIED
from m8d_build.wheel.wheelfile import MARKER_ENTRY, open_wheel
from multiworld.errors import MarkerError, ProvenanceError
from multiworld.provenance.statement import STATEMENT_NAME, contradictions, parse_statement
from multiworld.shim.marker import (
    OVERLAY_LIBRARY,
    LibraryInfo,
    compare,
    library_info_in,
    parse_marker,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from m8d_build.elf.read import Library
    from m8d_build.wheel.wheelfile import WheelFile
    from multiworld.shim.marker import Marker, Topic

__all__ = ["Bindings", "Inspection", "TopicState", "TopicStatus", "bindings_of", "inspect_wheel"]

GRAFTED = "torch/lib/libtorch_cuda.so"
OVERLAY = f"torch/lib/{OVERLAY_LIBRARY}"
INFO_SYMBOL = "m8d_patch_info"
_SHOWN = 5


class TopicStatus(str, Enum):
    """How a topic's patch in the wheel compares with this checkout's."""

    SAME = "same"
    DIFFERS = "differs"
    UNKNOWN = "unknown"  # this checkout has no such patch for that version


@dataclass(frozen=True)
class TopicState:
    """One topic of the marker.

    Attributes:
        name: "group-guard".
        sha256: of the patch the wheel was built with.
        status: compared with the patch of that topic in ``patches``.
    """

    name: str
    sha256: str
    status: TopicStatus


@dataclass(frozen=True)
class Bindings:
    """Where the names of an overlay and of libtorch_cuda.so lead; each list is sorted.

    Attributes:
        overlay: entry of the overlay library.
        needed: whether libtorch_cuda.so asks for it.
        moved: exported by the overlay, unfindable in libtorch_cuda.so: every caller gets the overlay's.
        added: exported by the overlay only.
        shared: found in both; the one that is loaded first is used. Right for what the process must have once
            and both may provide, wrong for a strong function.
        ambiguous: those of ``shared`` that are strong definitions: libtorch_cuda.so's would win.
        lost: unfindable in libtorch_cuda.so, and not exported by the overlay.
    """

    overlay: str
    needed: bool
    moved: tuple[str, ...]
    added: tuple[str, ...]
    shared: tuple[str, ...]
    ambiguous: tuple[str, ...]
    lost: tuple[str, ...]

    def faults(self) -> tuple[str, ...]:
        """Return what is wrong with them, one sentence each."""
        found = []
        if not self.needed:
            found.append(f"{GRAFTED} does not ask for {PurePosixPath(self.overlay).name}")
        if self.ambiguous:
            found.append(f"{GRAFTED} still finds its own {_some(self.ambiguous)}")
        if self.lost:
            found.append(f"nothing defines {_some(self.lost)} any more")
        if INFO_SYMBOL not in {*self.added, *self.moved}:
            found.append(f"{self.overlay} does not export {INFO_SYMBOL}")
        return tuple(found)


@dataclass(frozen=True)
class Inspection:
    """What was found in a wheel.

    Attributes:
        path: the wheel.
        version: of its file name.
        tags: of its file name, sorted.
        marker: None for a wheel that is not patched.
        topics: the marker's, compared with this checkout's patches.
        library: what the patched library says of itself; None if it says nothing or there is none.
        bindings: None if there is no overlay, or symbols were not asked for.
        disagreements: where two places in the wheel differ, one sentence each.
        notes: what is worth knowing and no fault.
    """

    path: Path
    version: str
    tags: tuple[str, ...]
    marker: Marker | None
    topics: tuple[TopicState, ...] = ()
    library: LibraryInfo | None = None
    bindings: Bindings | None = None
    disagreements: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def consistent(self) -> bool:
        """Whether nothing disagrees."""
        return not self.disagreements


def inspect_wheel(
    path: Path, patches: Path, *, symbols: bool = True, deep: bool = False, scratch: Path | None = None
) -> Inspection:
    """Look into a wheel, patched or not.

    Args:
        path: the wheel.
        patches: folder with the series, to compare the topics' hashes with.
        symbols: also read where symbols bind; unpacks libtorch_cuda.so (about 10 s and 900 MB of room).
        deep: also read every entry and compare it with RECORD (about 10 s).
        scratch: folder to unpack in; the system's if None.

    Raises:
        WheelInvalid: it is no whole wheel.
        ElfInvalid: a library in it is damaged.
        DiskFull: no room to unpack one.
    """
    wheel = open_wheel(path)
    if deep:
        wheel.verify_record(deep=True)
    tags = tuple(sorted(str(tag) for tag in wheel.tags))
    stated = tuple(sorted(str(tag) for tag in wheel.headers("WHEEL").get_all("Tag") or []))
    retagged = (
        f"the file name says {', '.join(tags)}, WHEEL says {', '.join(stated) or 'nothing'}"
        if stated != tags
        else ""
    )
    plain = Inspection(path, str(wheel.version), tags, None)
    if not wheel.patched:
        # Official wheels have had their file renamed for a wider platform, and PyPI's leave the local label
        # out.
        stray = (f"there is {OVERLAY}, but no {MARKER_ENTRY}",) if OVERLAY in wheel.entries else ()
        return replace(plain, disagreements=stray, notes=(retagged,) if retagged else ())
    faults = [retagged] if retagged else []
    try:
        marker = parse_marker(wheel.read(MARKER_ENTRY), where=MARKER_ENTRY)
    except MarkerError as exc:
        return replace(plain, disagreements=(*faults, str(exc)))
    faults += _version_faults(wheel, marker)
    stated, unstated = _provenance_faults(wheel, marker)
    with tempfile.TemporaryDirectory(prefix="inspect-", dir=scratch) as folder:
        info, bindings, more = _libraries(wheel, marker, Path(folder), symbols=symbols)
    return replace(
        plain,
        marker=marker,
        topics=_topics(marker.topics, marker.torch, patches),
        library=info,
        bindings=bindings,
        disagreements=(*faults, *stated, *more),
        notes=unstated,
    )


def bindings_of(entry: str, overlay: Library, grafted: Library) -> Bindings:
    """Say where the names of an overlay lead (pure).

    Args:
        entry: the overlay's name in the wheel.
        overlay: its symbols.
        grafted: libtorch_cuda.so's.
    """
    both = overlay.exports.keys() & grafted.exports.keys() - LINKER_SYMBOLS
    shared = both - grafted.unfindable
    return Bindings(
        overlay=entry,
        needed=PurePosixPath(entry).name in grafted.needed,
        moved=tuple(sorted(both & grafted.unfindable)),
        added=tuple(sorted(overlay.exports.keys() - grafted.exports.keys() - LINKER_SYMBOLS)),
        shared=tuple(sorted(shared)),
        ambiguous=tuple(sorted(name for name in shared if overlay.exports[name].binding == "GLOBAL")),
        lost=tuple(sorted(grafted.unfindable - overlay.exports.keys())),
    )


def _version_faults(wheel: WheelFile, marker: Marker) -> list[str]:
    """Compare the statements of the version; file name and METADATA were compared on opening."""
    said = f"{marker.torch}+{marker.local}"
    inside = wheel.version_file()
    faults = [
        f"{where} says {found}, {MARKER_ENTRY} says {said}"
        for where, found in (("the file name", str(wheel.version)), ("torch/version.py", inside.version))
        if found != said
    ]
    if inside.git_version != marker.commit:
        faults.append(
            f"torch/version.py says commit {inside.git_version}, {MARKER_ENTRY} says {marker.commit}"
        )
    return faults


def _provenance_faults(wheel: WheelFile, marker: Marker) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare the statement with RECORD and marker; return what differs, and notes."""
    name = f"{wheel.dist_info}/{STATEMENT_NAME}"
    if name not in wheel.entries:
        return (), ("it has no provenance statement: an older toolchain made it",)
    try:
        statement = parse_statement(wheel.read(name), where=name)
    except ProvenanceError as exc:
        return (str(exc),), ()
    digests = {row.path: row.sha256 for row in wheel.record if row.digest}
    unverified = statement.tools.get(UNVERIFIED)
    return (
        contradictions(statement, marker, digests),
        (f"made from inputs that are not those on record: {unverified}",) if unverified else (),
    )


def _libraries(
    wheel: WheelFile, marker: Marker, folder: Path, *, symbols: bool
) -> tuple[LibraryInfo | None, Bindings | None, tuple[str, ...]]:
    """Look at the library the marker names, and at how libtorch_cuda.so binds to it."""
    if marker.library not in wheel.entries:
        return None, None, (f"there is no {marker.library}, which {MARKER_ENTRY} names",)
    path, digest = _unpack(wheel, marker.library, folder)
    try:
        info = _info(path, marker.library)
    except MarkerError as exc:
        return None, None, (str(exc),)
    faults = compare(marker, info, digest)
    if not symbols or marker.overlay is None:
        return info, None, faults
    if GRAFTED not in wheel.entries:
        return info, None, (*faults, f"there is no {GRAFTED}")
    grafted, _ = _unpack(wheel, GRAFTED, folder)
    bindings = bindings_of(marker.library, read_library(path), read_library(grafted))
    return info, bindings, (*faults, *bindings.faults())


def _info(path: Path, entry: str) -> LibraryInfo | None:
    if path.stat().st_size == 0:
        raise WheelInvalid(f"{entry} is empty", rule="it must be a library", next_step="Build the wheel anew")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return library_info_in(data, where=entry)


def _unpack(wheel: WheelFile, name: str, folder: Path) -> tuple[Path, str]:
    """Unpack an entry; return the file and its SHA-256."""
    path = folder / PurePosixPath(name).name
    digest = hashlib.sha256()
    with needs_room(folder, f"unpacking {name}"), path.open("wb") as file:
        for block in wheel.blocks(name, BLOCK):
            file.write(block)
            digest.update(block)
    return path, digest.hexdigest()


def _topics(topics: Sequence[Topic], torch: str, patches: Path) -> tuple[TopicState, ...]:
    series = load_series(patches, torch) if (patches / f"v{torch}").is_dir() else None
    states = []
    for topic in topics:
        patch = series.patch(topic.name) if series is not None else None
        status = (
            TopicStatus.UNKNOWN
            if patch is None
            else TopicStatus.SAME
            if patch.sha256 == topic.sha256
            else TopicStatus.DIFFERS
        )
        states.append(TopicState(topic.name, topic.sha256, status))
    return tuple(states)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
