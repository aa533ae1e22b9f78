"""The dynamic section of a shared library, and the tables it points to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from m8d_build.elf.hashes import GnuHash
from m8d_build.elf.symbols import SYMBOL_SIZE, Symbol, read_symbols

if TYPE_CHECKING:
    from collections.abc import Iterator

    from m8d_build.elf.image import Image

__all__ = ["DynamicTable", "Tag", "VersionNeed"]

MAX_NEEDS = 4096  # versions; a damaged file could claim any number of them


class Tag:
    """The entries of .dynamic that are looked at (gABI, chapter 5, and the GNU extensions)."""

    NEEDED, HASH, STRTAB, SYMTAB, STRSZ, SONAME, RPATH, SYMBOLIC = 1, 4, 5, 6, 10, 14, 15, 16
    RUNPATH, FLAGS = 29, 30
    GNU_PRELINKED, GNU_CONFLICT, GNU_LIBLIST = 0x6FFFFDF5, 0x6FFFFEF8, 0x6FFFFEF9
    GNU_HASH, VERSYM, VERNEED, VERNEEDNUM = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF
    VERDEF, VERDEFNUM = 0x6FFFFFFC, 0x6FFFFFFD


DF_SYMBOLIC = 2


@dataclass(frozen=True)
class VersionNeed:
    """A version this library wants of another.

    Attributes:
        library: "libc.so.6".
        version: "GLIBC_2.14".
    """

    library: str
    version: str


class DynamicTable:
    """The dynamic linker's view of one library.

    Args:
        image: the library.

    Attributes:
        offset: of .dynamic in the file.
        slots: its entries as (tag, value), spare ones at the end included.
        used: number of entries before the first DT_NULL.

    Raises:
        ElfInvalid: it is no shared library, or the tables are damaged.
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.offset, self.slots = image.dynamic()
        self.used = next(i for i, (tag, _) in enumerate(self.slots) if tag == 0)
        self._first: dict[int, int] = {}
        for tag, value in self.slots[: self.used]:
            self._first.setdefault(tag, value)

    def __contains__(self, tag: int) -> bool:
        return tag in self._first

    @property
    def spare(self) -> int:
        """How many entries can be added: unused slots but the last, which must stay DT_NULL."""
        unused = self.slots[self.used :]
        return len(unused) - 1 if all(slot == (0, 0) for slot in unused) else 0

    @cached_property
    def strings(self) -> bytes:
        """The whole of .dynstr."""
        return self.image.bytes_at(self.strings_offset, self._first[Tag.STRSZ])

    @cached_property
    def strings_offset(self) -> int:
        """Where .dynstr is in the file."""
        if Tag.STRTAB not in self or Tag.STRSZ not in self:
            raise self.image.invalid("has no dynamic string table", "a shared library has one")
        return self.image.offset_of(self._first[Tag.STRTAB], self._first[Tag.STRSZ])

    @cached_property
    def hash(self) -> GnuHash | None:
        """The .gnu.hash table, None if there is none."""
        address = self._first.get(Tag.GNU_HASH)
        return None if address is None else GnuHash(self.image, self.image.offset_of(address, 16))

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        """All of .dynsym, undefined symbols and entry 0 included."""
        if Tag.SYMTAB not in self:
            raise self.image.invalid("has no dynamic symbol table", "a shared library has one")
        count = self._symbol_count()
        offset = self.image.offset_of(self._first[Tag.SYMTAB], count * SYMBOL_SIZE)
        return read_symbols(self.image, offset, count, self.strings, self._version_names(count))

    @property
    def symbolic(self) -> bool:
        """Whether it was linked so that its own definitions come first for itself (-Bsymbolic)."""
        return Tag.SYMBOLIC in self or bool(self._first.get(Tag.FLAGS, 0) & DF_SYMBOLIC)

    @property
    def prelinked(self) -> bool:
        """Whether prelink has bound its symbols already."""
        return any(tag in self for tag in (Tag.GNU_PRELINKED, Tag.GNU_CONFLICT, Tag.GNU_LIBLIST))

    def texts(self, tag: int) -> tuple[str, ...]:
        """Return the strings of every entry with a tag, in order."""
        return tuple(self._string(value) for t, value in self.slots[: self.used] if t == tag)

    def version_needs(self) -> tuple[VersionNeed, ...]:
        """Return every version wanted of another library (.gnu.version_r)."""
        return tuple(need for need, _ in islice(self._needs(), MAX_NEEDS))

    def unfindable(self) -> frozenset[str]:
        """Return the names it defines for others, but which a lookup through .gnu.hash does not find."""
        table, names = self.hash, [symbol.name for symbol in self.symbols]
        defined = {s.name for s in self.symbols if s.defined and s.binding != "LOCAL" and s.name}
        if table is None:
            return frozenset()
        return frozenset(
            n for n in defined if not any(self.symbols[i].defined for i in table.lookup(n, names))
        )

    def _symbol_count(self) -> int:
        # As the dynamic linker sees it; the section's size is a hint for tools and need not be there.
        if self.hash is not None and self.hash.chain:
            return self.hash.symbols
        if Tag.HASH in self:
            return int(self.image.unpack("<II", self.image.offset_of(self._first[Tag.HASH], 8))[1])
        section = self.image.section(".dynsym")
        if section is not None:
            return section.size // SYMBOL_SIZE
        if self.hash is not None:
            return self.hash.symoffset
        raise self.image.invalid("has neither .gnu.hash nor .hash", "a shared library has one of them")

    def _version_names(self, count: int) -> list[str]:
        if Tag.VERSYM not in self:
            return []
        names = {index: need.version for need, index in islice(self._needs(), MAX_NEEDS)}
        names.update(self._defined_versions())
        numbers = self.image.words("H", self.image.offset_of(self._first[Tag.VERSYM], 2 * count), count)
        # 0 is local, 1 global without a version; the top bit says "not the default one".
        return [
            "" if number & 0x7FFF <= 1 else names.get(number & 0x7FFF, f"?{number & 0x7FFF}")
            for number in numbers
        ]

    def _needs(self) -> Iterator[tuple[VersionNeed, int]]:
        if Tag.VERNEED not in self:
            return
        offset = self.image.offset_of(self._first[Tag.VERNEED], 16)
        for _ in range(min(self._first.get(Tag.VERNEEDNUM, 0), MAX_NEEDS)):
            _, count, library, first, following = self.image.unpack("<HHIII", offset)
            at = offset + first
            for _ in range(min(count, MAX_NEEDS)):
                _, _, index, name, step = self.image.unpack("<IHHII", at)
                yield VersionNeed(self._string(library), self._string(name)), index & 0x7FFF
                if not step:
                    break
                at += step
            if not following:
                return
            offset += following

    def _defined_versions(self) -> Iterator[tuple[int, str]]:
        if Tag.VERDEF not in self:
            return
        offset = self.image.offset_of(self._first[Tag.VERDEF], 20)
        for _ in range(min(self._first.get(Tag.VERDEFNUM, 0), MAX_NEEDS)):
            _, flags, index, _, _, first, following = self.image.unpack("<HHHHIII", offset)
            (name,) = self.image.unpack("<I", offset + first)
            if not flags & 1:  # VER_FLG_BASE names the library itself
                yield index & 0x7FFF, self._string(name)
            if not following:
                return
            offset += following

    def _string(self, at: int) -> str:
        end = self.strings.find(b"\0", at)
        if end < 0:
            raise self.image.invalid(f"has a string at {at} of .dynstr", "strings end inside the table")
        return self.strings[at:end].decode("utf-8", "surrogateescape")
