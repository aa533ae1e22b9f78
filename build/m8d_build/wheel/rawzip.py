"""Zip entries copied between archives without decompression, and the writer that takes them.

zipfile reads archives well but has no public way to copy compressed bytes. The format is APPNOTE.TXT of
PKWARE, 4.3 (records) and 4.5.3 (Zip64); Zip64 is used where a number does not fit, and only there.
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

from m8d_build.errors import WheelInvalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from m8d_build.wheel.deflate import Deflated

__all__ = ["Member", "ZipWriter", "member_of", "raw_offset"]

LIMIT32 = 0xFFFFFFFF  # numbers from here on stand in a Zip64 record
LIMIT16 = 0xFFFF
COPY = 4 << 20

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_SIG_LOCAL, _SIG_CENTRAL, _SIG_END = 0x04034B50, 0x02014B50, 0x06054B50
_SIG_END64, _SIG_LOCATOR64 = 0x06064B50, 0x07064B50
_DESCRIPTOR, _UTF8 = 0x8, 0x800
_SEE64, _SEE64_SHORT = 0xFFFFFFFF, 0xFFFF  # what a field holds then
_UNIX = 3


@dataclass(frozen=True)
class Member:
    """An entry as the central directory describes it.

    Attributes:
        name: with a trailing slash for a folder.
        date_time: year, month, day, hour, minute, second.
        mode: Unix file mode with its type bits.
        method: zipfile.ZIP_STORED or ZIP_DEFLATED.
        flags: general purpose bits; the one for a data descriptor is dropped when written.
        crc, compressed_size, size: of the data, 0 until known.
        offset: of its local header in the archive being written.
    """

    name: str
    date_time: tuple[int, int, int, int, int, int]
    mode: int
    method: int = zipfile.ZIP_DEFLATED
    flags: int = 0
    crc: int = 0
    compressed_size: int = 0
    size: int = 0
    offset: int = 0


def member_of(info: zipfile.ZipInfo, name: str) -> Member:
    """Return an existing entry under a (perhaps new) name."""
    return Member(
        name, info.date_time, info.external_attr >> 16, info.compress_type, info.flag_bits & ~_UTF8,
        info.CRC, info.compress_size, info.file_size,
    )  # fmt: skip


def raw_offset(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Return where an entry's compressed bytes begin: its local header has a length of its own.

    Raises:
        WheelInvalid: there is no local header of this entry where the central directory says.
    """
    file.seek(info.header_offset)
    head = file.read(_LOCAL.size)
    fields = _LOCAL.unpack(head) if len(head) == _LOCAL.size else (0,) * 11
    name = file.read(fields[9])
    stated = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
    if fields[0] != _SIG_LOCAL or name != stated:
        raise WheelInvalid(
            f"{info.filename}: no entry of this name at offset {info.header_offset}",
            rule="the archive's directory says it is there",
            next_step="Download the official wheel again, or delete it so that it is downloaded anew",
        )
    return info.header_offset + _LOCAL.size + int(fields[9]) + int(fields[10])


class ZipWriter:
    """Writes an archive entry by entry into a seekable file, then its directory.

    The bytes depend on what was added alone: no clock, no user, no umask.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._members: list[Member] = []

    def copy(self, member: Member, source: IO[bytes], offset: int) -> None:
        """Add an entry whose compressed bytes stand at ``offset`` in another archive.

        Raises:
            WheelInvalid: the other archive ends before they do.
        """
        self._start(member, wide=self._wide(member.size, member.compressed_size))
        source.seek(offset)
        left = member.compressed_size
        while left:
            block = source.read(min(left, COPY))
            if not block:
                raise WheelInvalid(
                    f"{member.name}: the archive ends inside it", next_step="Download the wheel again"
                )
            self._file.write(block)
            left -= len(block)

    def add(
        self, member: Member, size: int, fill: Callable[[Callable[[bytes], object]], Deflated]
    ) -> Deflated:
        """Add an entry compressed on the fly.

        Args:
            member: name, time, mode.
            size: about how many bytes it will have uncompressed: decides the kind of its header.
            fill: called with a function that takes compressed bytes; returns what went through.

        Raises:
            ValueError: the entry needs Zip64 and ``size`` did not say so.
        """
        wide = self._wide(size, size + (size >> 8) + COPY)  # deflate never grows data by as much
        self._start(member, wide=wide)
        done = fill(self._file.write)
        if not wide and self._wide(done.size, done.compressed_size):
            raise ValueError(f"{member.name} was said to have {size} bytes and has {done.size}")
        end = self._file.tell()
        full = replace(
            self._members.pop(), crc=done.crc, compressed_size=done.compressed_size, size=done.size
        )
        self._file.seek(full.offset)
        self._file.write(_local_header(full, wide=wide))
        self._file.seek(end)
        self._members.append(full)
        return done

    def close(self) -> None:
        """Write the directory. The file itself stays open."""
        start = self._file.tell()
        for member in self._members:
            self._file.write(_central_header(member))
        size, count = self._file.tell() - start, len(self._members)
        if count >= LIMIT16 or size >= LIMIT32 or start >= LIMIT32:
            at = self._file.tell()
            self._file.write(
                _END64.pack(_SIG_END64, _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
            )
            self._file.write(_LOCATOR64.pack(_SIG_LOCATOR64, 0, at, 1))
        short = count if count < LIMIT16 else _SEE64_SHORT
        self._file.write(_END.pack(_SIG_END, 0, 0, short, short, _field(size), _field(start), 0))

    def _start(self, member: Member, *, wide: bool) -> None:
        placed = replace(member, offset=self._file.tell(), flags=member.flags & ~_DESCRIPTOR)
        self._file.write(_local_header(placed, wide=wide))
        self._members.append(placed)

    @staticmethod
    def _wide(*sizes: int) -> bool:
        return any(size >= LIMIT32 for size in sizes)


def _encoded(member: Member) -> tuple[bytes, int]:
    if member.name.isascii():
        return member.name.encode("ascii"), member.flags
    return member.name.encode(), member.flags | _UTF8


def _dos_time(member: Member) -> tuple[int, int]:
    year, month, day, hour, minute, second = member.date_time
    return hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day


def _field(number: int) -> int:
    return number if number < LIMIT32 else _SEE64


def _local_header(member: Member, *, wide: bool) -> bytes:
    name, flags = _encoded(member)
    extra = struct.pack("<HHQQ", 1, 16, member.size, member.compressed_size) if wide else b""
    sizes = (_SEE64, _SEE64) if wide else (member.compressed_size, member.size)
    head = _LOCAL.pack(
        _SIG_LOCAL, 45 if wide else 20, flags, member.method, *_dos_time(member), member.crc,
        *sizes, len(name), len(extra),
    )  # fmt: skip
    return head + name + extra


def _central_header(member: Member) -> bytes:
    name, flags = _encoded(member)
    numbers = (member.size, member.compressed_size, member.offset)  # the order of the Zip64 record
    big = [number for number in numbers if number >= LIMIT32]
    extra = struct.pack(f"<HH{len(big)}Q", 1, 8 * len(big), *big) if big else b""
    size, compressed, offset = (_field(number) for number in numbers)
    version = 45 if big else 20
    folder = 0x10 if member.name.endswith("/") else 0
    head = _CENTRAL.pack(
        _SIG_CENTRAL, _UNIX << 8 | version, version, flags, member.method, *_dos_time(member), member.crc,
        compressed, size, len(name), len(extra), 0, 0, 0, member.mode << 16 | folder, offset,
    )  # fmt: skip
    return head + name + extra
