"""Git blob ids and SHA-256 digests of files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["blob_id", "file_sha256"]

CHUNK = 1 << 20


def blob_id(data: bytes) -> str:
    """Return the git blob id of file contents: SHA-1 over ``blob <size>\\0<bytes>``, 40 hex digits."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
