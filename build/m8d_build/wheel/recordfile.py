"""RECORD: a wheel's list of files with their digests, read and written."""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.errors import WheelInvalid
from multiworld.provenance.wheel import record_sha256

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RecordRow", "format_record", "parse_record", "record_digest"]

_AGAIN = "Download the official wheel again, or delete it so that it is downloaded anew"


@dataclass(frozen=True)
class RecordRow:
    """One line of RECORD.

    Attributes:
        path: entry name, relative to the root of the wheel.
        digest: ``sha256=<urlsafe base64 without padding>``, "" for RECORD itself.
        size: bytes, None where the line gives none.
    """

    path: str
    digest: str
    size: int | None

    @property
    def sha256(self) -> str:
        """The digest in hexadecimal; "" if it is none of SHA-256."""
        return record_sha256(self.digest)


def parse_record(data: bytes, *, where: str) -> tuple[RecordRow, ...]:
    """Return RECORD's lines in their order.

    Raises:
        WheelInvalid: it is no UTF-8, a line has not three fields, a size is no number, or a path stands
            twice.
    """
    rows: dict[str, RecordRow] = {}
    try:
        for number, fields in enumerate(csv.reader(io.StringIO(data.decode(), newline="")), 1):
            if not fields:
                continue
            size_ok = len(fields) == 3 and (
                fields[2] == "" or (fields[2].isascii() and fields[2].isdecimal())
            )
            if not size_ok or fields[0] in rows:
                raise WheelInvalid(
                    f"{where}: RECORD line {number} is {','.join(fields)!r}",
                    rule="a line is path, digest, size, and no path stands twice",
                    next_step=_AGAIN,
                )
            rows[fields[0]] = RecordRow(fields[0], fields[1], int(fields[2]) if fields[2] else None)
    except (UnicodeDecodeError, csv.Error) as exc:
        raise WheelInvalid(f"{where}: RECORD cannot be read: {exc}", next_step=_AGAIN) from exc
    return tuple(rows.values())


def format_record(rows: Iterable[RecordRow]) -> bytes:
    """Return RECORD's bytes: sorted by path, the line without a digest (RECORD's own) last, LF endings."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for row in sorted(rows, key=lambda row: (row.digest == "", row.path)):
        writer.writerow((row.path, row.digest, "" if row.size is None else row.size))
    return text.getvalue().encode()


def record_digest(sha256: bytes) -> str:
    """Return a SHA-256 as RECORD writes it: ``sha256=`` and urlsafe base64 without padding."""
    return "sha256=" + base64.urlsafe_b64encode(sha256).rstrip(b"=").decode()
