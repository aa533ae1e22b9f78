"""A patched wheel verified: every file against RECORD, the statement in it against both."""

from __future__ import annotations

import base64
import csv
import errno
import hashlib
import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from multiworld._c10d.marker import parse_marker
from multiworld.errors import MarkerError, ProvenanceError
from multiworld.provenance.statement import (
    MARKER_ENTRY,
    STATEMENT_NAME,
    contradictions,
    parse_statement,
    statement_bytes,
)

try:
    from lzma import LZMAError as _LzmaError
except ImportError:  # a Python without lzma: zipfile says NotImplementedError
    _LzmaError = zipfile.BadZipFile  # type: ignore[misc,assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from multiworld._c10d.marker import Marker
    from multiworld.provenance.statement import Statement

__all__ = [
    "BROKEN_ZIP",
    "VerifiedWheel",
    "file_digest",
    "of_damage",
    "record_sha256",
    "signed_statement",
    "verify_wheel",
]

_BLOCK = 1 << 20
_AGAIN = "Take the wheel again from where it came from, or build it again"
# What zipfile and the decompressors raise on bytes that are no whole zip, beside OSError (`of_damage`):
# RuntimeError where a bit says encrypted, ValueError where a name is not in its encoding.
BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, _LzmaError, struct.error, EOFError, RuntimeError, ValueError)


@dataclass(frozen=True)
class VerifiedWheel:
    """A wheel whose files, RECORD, marker and statement agree.

    Attributes:
        path: of the wheel.
        sha256: of the file.
        files: how many there are in it.
        statement: what it was built from.
    """

    path: Path
    sha256: str
    files: int
    statement: Statement

    @property
    def payload(self) -> bytes:
        """What is signed: see `signed_statement`."""
        return signed_statement(self.statement, self.path.name, self.sha256)


def verify_wheel(path: Path, progress: Callable[[int, int], None] = lambda *_: None) -> VerifiedWheel:
    """Read every file of a patched wheel, and compare it with RECORD and with the statement.

    A torch wheel takes about ten seconds.

    Args:
        path: of the wheel.
        progress: called with the bytes that were read and the bytes that there are.

    Raises:
        ProvenanceError: it is no wheel, has no statement, or two of its parts differ.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            dist_info = _dist_info(path, names)
            digests = _digests(archive, progress)
            record = archive.read(f"{dist_info}/RECORD")
            said = f"{dist_info}/{STATEMENT_NAME}"
            data = archive.read(said) if said in digests else None
            marker = archive.read(MARKER_ENTRY) if MARKER_ENTRY in digests else None
    except (*BROKEN_ZIP, OSError) as exc:
        raise _unsound(path, f"cannot be read: {exc}", "it must be a whole wheel") from exc
    _check_record(path, record, digests, f"{dist_info}/RECORD")
    if data is None:
        raise ProvenanceError(
            f"{path.name} has no {said}",
            rule="a wheel that build-torch made says what it was made from",
            next_step="Build it with this version: nox -s build-torch",
        )
    statement = parse_statement(data, where=f"{path.name}: {said}")
    found = contradictions(statement, _marker(path, marker), digests)
    if found:
        raise _unsound(path, f"contradicts itself: {'; '.join(found)}", "statement, marker and files agree")
    return VerifiedWheel(path, file_digest(path), len(names), statement)


def of_damage(exc: BaseException) -> bool:
    """Whether damaged bytes of a zip are the cause, where it may be OSError, and the system another.

    bz2 gives no number, and an offset out of range is an invalid argument.
    """
    return not isinstance(exc, OSError) or exc.errno in {None, errno.EINVAL}


def signed_statement(statement: Statement, name: str, sha256: str) -> bytes:
    """Return what is signed: the statement in a wheel, with the wheel as one more subject.

    Args:
        statement: of the wheel.
        name: its file name.
        sha256: of the file.
    """
    return statement_bytes(replace(statement, subjects={**statement.subjects, name: sha256}))


def file_digest(path: Path) -> str:
    """Return a file's SHA-256, 64 hex digits.

    Raises:
        ProvenanceError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as exc:
        raise _unsound(path, f"cannot be read: {exc.strerror}", "its SHA-256 is compared") from exc
    return digest.hexdigest()


def record_sha256(digest: str) -> str:
    """Return a digest of RECORD in hexadecimal; "" if it is none of SHA-256."""
    kind, _, text = digest.partition("=")
    try:
        found = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return ""
    return found.hex() if kind == "sha256" and len(found) == hashlib.sha256().digest_size else ""


def _dist_info(path: Path, names: list[str]) -> str:
    if len(set(names)) != len(names):
        raise _unsound(path, "has two files of one name", "each name stands once")
    # A package may carry others, with their dist-info, further down.
    found = [name for name in names if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
    if len(found) != 1:
        raise _unsound(path, f"has {len(found)} files RECORD", "a wheel has one, in a folder at its top")
    return found[0].partition("/")[0]


def _digests(archive: zipfile.ZipFile, progress: Callable[[int, int], None]) -> dict[str, str]:
    infos = [info for info in archive.infolist() if not info.is_dir()]
    total, done, found = sum(info.file_size for info in infos), 0, {}
    for info in infos:
        digest = hashlib.sha256()
        with archive.open(info) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                progress(done, total)
        found[info.filename] = digest.hexdigest()
    return found


def _check_record(path: Path, record: bytes, digests: Mapping[str, str], own: str) -> None:
    try:
        rows = [row for row in csv.reader(io.StringIO(record.decode(), newline="")) if row]
        said = {name: _hex(digest) for name, digest, _ in rows if name != own}
    except (ValueError, csv.Error) as exc:
        raise _unsound(path, f"has an unreadable RECORD: {exc}", "it lists names, digests, sizes") from exc
    there = {name: digest for name, digest in digests.items() if name != own}
    wrong = sorted(name for name in said.keys() | there.keys() if said.get(name) != there.get(name))
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise _unsound(
            path, f"does not agree with its RECORD: {', '.join(wrong[:3])}{more}", "RECORD lists each file"
        )


def _hex(digest: str) -> str:
    found = record_sha256(digest)
    if not found:
        raise ValueError(f"{digest!r} is no SHA-256")
    return found


def _marker(path: Path, data: bytes | None) -> Marker | None:
    try:
        return None if data is None else parse_marker(data, where=f"{path.name}: {MARKER_ENTRY}")
    except MarkerError as exc:
        raise _unsound(path, f"has an unreadable marker: {exc.value}", exc.rule) from exc


def _unsound(path: Path, what: str, rule: str) -> ProvenanceError:
    return ProvenanceError(f"{path.name} {what}", rule=rule, next_step=_AGAIN)
