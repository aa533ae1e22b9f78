"""A wheel opened and validated: consistent names, whole zip, correct RECORD, the right target."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from typing import TYPE_CHECKING, Literal

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from m8d_build.errors import WheelAlreadyPatched, WheelInvalid, WheelMismatch
from m8d_build.files.blobs import file_sha256
from m8d_build.wheel.recordfile import parse_record, record_digest
from m8d_build.wheel.versionfile import VERSION_ENTRY, parse_version_file
from multiworld.provenance.statement import MARKER_ENTRY
from multiworld.provenance.wheel import BROKEN_ZIP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import Message
    from pathlib import Path

    from packaging.tags import Tag

    from m8d_build.targets import Target
    from m8d_build.wheel.recordfile import RecordRow
    from m8d_build.wheel.versionfile import VersionFile

__all__ = ["MARKER_ENTRY", "WheelFile", "open_wheel"]


CHUNK = 1 << 20
_ENCRYPTED = 0x1
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")  # signatures over RECORD cannot stand in it
_AGAIN = "Download the official wheel again, or delete it so that it is downloaded anew"


@dataclass(frozen=True)
class WheelFile:
    """A wheel whose names, folders and RECORD were found to agree.

    Attributes:
        path: the file.
        name: distribution name, normalised.
        version: as in file name and METADATA.
        build: build tag of the file name, "" if it has none.
        tags: what the file name says it runs on.
        dist_info: name of the dist-info folder, without a slash.
        metadata: the bytes of METADATA.
        wheel: the bytes of WHEEL.
        record: RECORD's lines in their order.
        entries: zip entries by name, in the order of the central directory, folders included.
    """

    path: Path
    name: str
    version: Version
    build: str
    tags: frozenset[Tag]
    dist_info: str
    metadata: bytes
    wheel: bytes
    record: tuple[RecordRow, ...]
    entries: Mapping[str, zipfile.ZipInfo]

    @property
    def patched(self) -> bool:
        """Whether our marker stands in it."""
        return MARKER_ENTRY in self.entries

    @property
    def python_tags(self) -> tuple[str, ...]:
        """The interpreters of the file name, sorted ("cp311")."""
        return tuple(sorted({tag.interpreter for tag in self.tags}))

    @property
    def abi_tags(self) -> tuple[str, ...]:
        """The ABIs of the file name, sorted ("cp311", "cp313t")."""
        return tuple(sorted({tag.abi for tag in self.tags}))

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms of the file name, sorted ("manylinux1_x86_64")."""
        return tuple(sorted({tag.platform for tag in self.tags}))

    def headers(self, which: Literal["METADATA", "WHEEL"]) -> Message:
        """Return the header fields of METADATA or WHEEL."""
        return BytesHeaderParser().parsebytes(self.metadata if which == "METADATA" else self.wheel)

    def read(self, name: str) -> bytes:
        """Return an entry's bytes.

        Raises:
            WheelInvalid: there is no such entry, or its bytes are damaged.
        """
        return b"".join(self.blocks(name))

    def blocks(self, name: str, size: int = CHUNK) -> Iterator[bytes]:
        """Yield an entry's bytes in blocks of ``size``; the archive is open until the last one was taken.

        Raises:
            WheelInvalid: there is no such entry, or its bytes are damaged.
        """
        info = self.entries.get(name)
        if info is None:
            raise _invalid(self.path, f"has no {name}", "an official torch wheel has it")
        try:
            archive = zipfile.ZipFile(self.path)
        except (*BROKEN_ZIP, OSError) as exc:
            raise _damaged(self.path, name, exc) from exc
        with archive:
            yield from self._blocks(archive, info, size)

    def _blocks(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, size: int) -> Iterator[bytes]:
        try:
            with archive.open(info) as stream:
                while block := stream.read(size):
                    yield block
        except (*BROKEN_ZIP, OSError) as exc:
            raise _damaged(self.path, info.filename, exc) from exc

    def version_file(self) -> VersionFile:
        """Return what torch/version.py says.

        Raises:
            WheelInvalid: it is missing or says no version.
        """
        return parse_version_file(self.read(VERSION_ENTRY), where=f"{self.path.name}: {VERSION_ENTRY}")

    def verify_record(self, *, deep: bool = False) -> None:
        """Check that RECORD and the entries agree.

        Args:
            deep: also read every entry and compare its CRC and SHA-256 (about 10 s for an official wheel);
                without it names and sizes are compared.

        Raises:
            WheelInvalid: they do not; the message names the entry.
        """
        _check_record(self.path, self.dist_info, self.record, self.entries)
        if not deep:
            return
        rows = {row.path: row for row in self.record}
        with zipfile.ZipFile(
            self.path
        ) as archive:  # once: reading the directory takes as long as many entries
            for name, info in self.entries.items():
                if info.is_dir():
                    continue
                digest = hashlib.sha256()
                for block in self._blocks(archive, info, CHUNK):
                    digest.update(block)
                row = rows.get(name)
                if row is not None and row.digest and row.digest != record_digest(digest.digest()):
                    raise _invalid(
                        self.path, f"{name} has another SHA-256 than its line in RECORD", "they must agree"
                    )

    def require_unpatched(self) -> None:
        """Refuse a wheel that carries our marker.

        Raises:
            WheelAlreadyPatched: it does.
        """
        if self.patched:
            raise WheelAlreadyPatched(
                f"{self.path.name} carries {MARKER_ENTRY}",
                rule="a wheel is patched once, from the official one",
                next_step=f"Give the official wheel; `python -m m8d_build inspect {self.path}` shows what "
                "this one is",
            )

    def check_against(
        self,
        target: Target,
        python_tag: str,
        *,
        sha256: str | None = None,
        allow_unverified: bool = False,
    ) -> bool:
        """Check that this is the official wheel of a target for one Python on Linux x86_64.

        Args:
            target: what it should be.
            python_tag: the interpreter ("cp311").
            sha256: of the file, where the caller has computed it; read from the file otherwise.
            allow_unverified: accept a wheel whose SHA-256 is not recorded; everything else is still checked,
                and each entry is compared with RECORD.

        Returns:
            Whether it is a file that was recorded.

        Raises:
            WheelAlreadyPatched: it carries our marker.
            WheelMismatch: it is of another project, version, Python, platform, CUDA or commit, or not the
                file that was recorded.
            WheelInvalid: torch/version.py cannot be read, or a wheel that was not recorded is damaged.
        """
        self.require_unpatched()
        if self.name != "torch":
            raise self._mismatch("project", self.name, "torch")
        if self.version.public != target.version:
            raise self._mismatch("torch version", str(self.version), target.version)
        if python_tag not in self.python_tags:
            raise self._mismatch("Python", ", ".join(self.python_tags), python_tag)
        if not any(_is_linux_x86_64(platform) for platform in self.platforms):
            raise self._mismatch("platform", ", ".join(self.platforms), "linux or manylinux, x86_64")
        inside = self.version_file()
        locals_known = sorted({w.local for w in target.wheels})
        if locals_known and inside.local not in locals_known:
            raise self._mismatch("local version label", inside.local or "none", " or ".join(locals_known))
        if target.abi is not None and inside.cuda != target.abi.cuda:
            raise self._mismatch("CUDA", inside.cuda or "none", target.abi.cuda)
        if target.commit and inside.git_version != target.commit:
            raise self._mismatch("git_version", inside.git_version, target.commit)
        found = sha256 or file_sha256(self.path)
        known = {w.sha256: w.filename for w in target.wheels}
        if found in known:
            return True
        if not allow_unverified:
            listed = ", ".join(f"{digest} ({name})" for digest, name in known.items()) or "none"
            raise WheelMismatch(
                f"{self.path.name} has the SHA-256 {found}",
                rule=f"the official wheels recorded for torch {target.version} are {listed}",
                next_step="Give one of these, or pass --allow-unverified if you trust this file",
            )
        # Entries that are not changed are copied unread: the damage would be in the patched wheel, too.
        self.verify_record(deep=True)
        return False

    def _mismatch(self, what: str, found: str, wanted: str) -> WheelMismatch:
        return WheelMismatch(
            f"{self.path.name}: {what} is {found}",
            rule=f"the target's is {wanted}",
            next_step="Give the target's official wheel, or pick another target with --torch",
        )


def open_wheel(path: Path) -> WheelFile:
    """Open and validate a wheel: file name, zip structure, dist-info, METADATA, WHEEL, RECORD.

    Raises:
        WheelInvalid: it is no whole wheel; the message says what is wrong.
    """
    try:
        name, version, build, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as exc:
        raise _invalid(path, "is no wheel's file name", str(exc)) from exc
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            entries = _entries(path, infos)
            dist_info = _dist_info(path, entries, name, version)
            texts = []
            for text in ("METADATA", "WHEEL", "RECORD"):
                if f"{dist_info}/{text}" not in entries:
                    raise _invalid(path, f"has no {dist_info}/{text}", "every wheel has it")
                texts.append(archive.read(f"{dist_info}/{text}"))
            _check_end(path, archive, infos)
    except FileNotFoundError as exc:
        raise _invalid(path, "is not there", "it must be an official wheel") from exc
    except (*BROKEN_ZIP, OSError) as exc:
        raise _invalid(path, f"is no whole zip archive ({exc})", "it is damaged or was cut short") from exc
    metadata, wheel, record = texts
    stated = BytesHeaderParser().parsebytes(metadata)["Version"]
    if _version(str(stated)) != version:
        raise _invalid(path, f"has METADATA Version {stated}", f"its file name says {version}")
    stated = BytesHeaderParser().parsebytes(wheel)["Wheel-Version"]
    if not str(stated).startswith("1."):
        raise _invalid(path, f"has Wheel-Version {stated}", "1.x can be read")
    rows = parse_record(record, where=str(path))
    _check_record(path, dist_info, rows, entries)
    tag = f"{build[0]}{build[1]}" if build else ""
    return WheelFile(path, name, version, tag, tags, dist_info, metadata, wheel, rows, entries)


def _entries(path: Path, infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        parts = info.filename.split("/")
        if info.filename in entries or ".." in parts or parts[0] == "" or info.flag_bits & _ENCRYPTED:
            raise _invalid(
                path,
                f"has a bad entry {info.filename!r}",
                "names stand once, are relative, and entries are not encrypted",
            )
        entries[info.filename] = info
    return entries


def _check_end(path: Path, archive: zipfile.ZipFile, infos: list[zipfile.ZipInfo]) -> None:
    """Entries must lie before the central directory: zipfile itself finds that out only when reading one."""
    for info in infos:
        if not 0 <= info.header_offset <= archive.start_dir - 30 - info.compress_size:
            raise _invalid(path, f"has {info.filename} outside the archive", "it is damaged or was cut short")


def _dist_info(path: Path, entries: Mapping[str, zipfile.ZipInfo], name: str, version: Version) -> str:
    folders = sorted(
        {top for top in (entry.split("/")[0] for entry in entries) if top.endswith(".dist-info")}
    )
    if len(folders) != 1:
        raise _invalid(path, f"has the dist-info folders {', '.join(folders) or 'none'}", "a wheel has one")
    own_name, _, own_version = folders[0].removesuffix(".dist-info").partition("-")
    if canonicalize_name(own_name) != name or _version(own_version) != version:
        raise _invalid(path, f"has the folder {folders[0]}", f"its file name says {name} {version}")
    return folders[0]


def _check_record(
    path: Path, dist_info: str, rows: tuple[RecordRow, ...], entries: Mapping[str, zipfile.ZipInfo]
) -> None:
    files = {name: info.file_size for name, info in entries.items() if not info.is_dir()}
    unrecorded = {f"{dist_info}/RECORD", *(f"{dist_info}/{name}" for name in _SIGNATURES)}
    for row in rows:
        if row.path not in files:
            raise _invalid(path, f"lacks {row.path}", "RECORD lists it")
        if row.size is not None and row.size != files[row.path]:
            raise _invalid(path, f"{row.path} has {files[row.path]} bytes", f"RECORD says {row.size}")
        if not row.digest.startswith("sha256=") and row.path not in unrecorded:
            raise _invalid(path, f"RECORD gives {row.path} the digest {row.digest!r}", "it must be a sha256")
    missing = files.keys() - {row.path for row in rows} - unrecorded
    if missing:
        raise _invalid(path, f"has {min(missing)}", "RECORD does not list it")


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _is_linux_x86_64(platform: str) -> bool:
    return platform.endswith("_x86_64") and platform.startswith(("linux", "manylinux"))


def _invalid(path: Path, what: str, rule: str) -> WheelInvalid:
    return WheelInvalid(f"{path} {what}", rule=rule, next_step=_AGAIN)


def _damaged(path: Path, name: str, exc: Exception) -> WheelInvalid:
    return _invalid(path, f"{name} is damaged ({exc})", "its bytes must match the archive's CRC")
