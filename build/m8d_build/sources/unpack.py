"""Extraction of some folders from a source archive; members that leave it are refused."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from m8d_build.errors import WrongTree
from m8d_build.sources.base import is_wanted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ARCHIVE_ERRORS", "unpack"]

CHUNK = 1 << 16
# What a cut or altered archive makes the standard library raise.
ARCHIVE_ERRORS = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError)


def unpack(archive: Path, into: Path, wanted: Sequence[str]) -> int:
    """Unpack the wanted folders and the files at the top, without the archive's one top folder.

    Links, devices and names that lead outside are refused by a check of our own, whatever the Python, and by
    tarfile's "data" filter where it has one (3.10 and 3.11 only got it late).

    Args:
        archive: a tar archive, compressed or not.
        into: an existing folder.
        wanted: folders relative to the archive's top folder.

    Returns:
        How many files were unpacked.

    Raises:
        WrongTree: a member is unsafe.
        tarfile.TarError, lzma.LZMAError, zlib.error, EOFError: the archive is damaged (ARCHIVE_ERRORS).
        OSError: a file cannot be written, or is no archive.
    """
    count = 0
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        for member in tar:
            inside = _inside(archive, member.name)
            if not inside or not is_wanted(inside, wanted) or member.isdir():
                continue
            if member.issym():  # a few convenience links, none of them source; unpacking none is safest
                continue
            if not member.isfile():
                raise _unsafe(archive, member.name, "is neither a file nor a folder")
            member.name = inside
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            member.uid, member.gid = os.getuid(), os.getgid()  # root would give files to the archive's users
            _extract(tar, member, into)
            count += 1
        _read_end(tar)
    return count


def _read_end(tar: tarfile.TarFile) -> None:
    """Read what follows the last member, so that the compressor checks its sums, and see that it is the end.

    tarfile takes a damaged header, or a file that is cut between two members, for the end of the archive. At
    the real end it has read one block of zeros, and at least one more follows.
    """
    length, blank = 0, True
    while tar.fileobj is not None and (block := tar.fileobj.read(CHUNK)):
        length += len(block)
        blank = blank and not any(block)
    if not (length >= tarfile.BLOCKSIZE and blank):
        raise tarfile.ReadError("it is cut, or damaged between two members")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    try:
        tar.extract(member, into, numeric_owner=True)
    except OSError as exc:
        if exc.errno is None:  # bz2 and gzip report damaged data so; the disk's own errors carry a number
            raise tarfile.ReadError(str(exc)) from exc
        raise


def _inside(archive: Path, name: str) -> str:
    """Return a member's path below the top folder, "" for the top folder itself."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise _unsafe(archive, name, "leads outside")
    return "/".join(path.parts[1:])


def _unsafe(archive: Path, name: str, what: str) -> WrongTree:
    return WrongTree(
        f"{archive.name} has the member {name!r}, which {what}",
        rule="a source archive holds plain files in folders",
        next_step="Do not use this archive; get the sources with --source git or --source PATH",
    )
