"""An ELF file parsed: names, needed libraries, symbols, versions. Damage is always ElfInvalid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from m8d_build.elf.dynamic import DynamicTable, Tag, VersionNeed
from m8d_build.elf.image import SHT_NOBITS, open_image
from m8d_build.elf.symbols import SYMBOL_SIZE, Symbol, read_symbols

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from m8d_build.elf.image import Image

__all__ = [
    "Library", "ObjectFile", "compilers", "facts_of", "glibc_floor", "read_constant", "read_library",
    "read_object", "read_symtab", "required_versions",
]  # fmt: skip

NT_GNU_BUILD_ID = 3
# Features of the dynamic linker that have a version name of their own, and the glibc that brought them.
GLIBC_FEATURES = {"GLIBC_ABI_DT_RELR": (2, 36), "GLIBC_ABI_GNU2_TLS": (2, 42), "GLIBC_ABI_GNU_TLS": (2, 42)}
_NUMBERED = re.compile(r"([A-Z][A-Z0-9]*)_(\d+(?:\.\d+)+)")


@dataclass(frozen=True)
class Library:
    """A shared library as the dynamic linker sees it.

    Attributes:
        name: the path it was read from, for messages.
        soname: its own name, "" if it has none.
        needed: the libraries it asks for, in order.
        rpath: DT_RPATH, "" if there is none.
        runpath: DT_RUNPATH, "" if there is none.
        symbols: its dynamic symbols, defined or wanted.
        unfindable: names it defines, but which a lookup does not find.
        version_needs: versions it wants of other libraries.
        spare_slots: entries that can still be added to .dynamic.
        gnu_hash: whether it has a .gnu.hash table.
        sysv_hash: whether it has the old .hash table.
        symbolic: whether it prefers its own definitions (-Bsymbolic).
        prelinked: whether prelink has been at it.
        build_id: hex digits, "" if it has none.
    """

    name: str
    soname: str
    needed: tuple[str, ...]
    rpath: str
    runpath: str
    symbols: tuple[Symbol, ...]
    unfindable: frozenset[str]
    version_needs: tuple[VersionNeed, ...]
    spare_slots: int
    gnu_hash: bool
    sysv_hash: bool
    symbolic: bool
    prelinked: bool
    build_id: str

    @cached_property
    def exports(self) -> Mapping[str, Symbol]:
        """Every definition others could bind to if a lookup finds it, by name."""
        return {s.name: s for s in self.symbols if s.name and s.defined and s.binding != "LOCAL"}


@dataclass(frozen=True)
class ObjectFile:
    """A compiled translation unit.

    Attributes:
        name: the path it was read from.
        source: the source file's name without folders ("NCCLUtils.cpp"), "" if the compiler did not say.
        sections: names of its sections by number.
        symbols: its whole symbol table.
    """

    name: str
    source: str
    sections: tuple[str, ...]
    symbols: tuple[Symbol, ...]

    @cached_property
    def definitions(self) -> Mapping[str, Symbol]:
        """What it defines for other files, by name: strong, weak and unique symbols of any visibility."""
        return {s.name: s for s in self.symbols if s.name and s.defined and s.binding != "LOCAL"}

    def section_of(self, symbol: Symbol) -> str:
        """Return the name of a symbol's section, "" if it has none (absolute, common)."""
        return self.sections[symbol.section] if symbol.section < len(self.sections) else ""


def read_library(path: Path) -> Library:
    """Read a shared library's dynamic facts (half a second for the 900 MB libtorch_cuda.so).

    Raises:
        ElfInvalid: it is unreadable, truncated, damaged, 32-bit, of another machine, or no shared library.
    """
    with open_image(path) as image:
        return facts_of(image)


def facts_of(image: Image) -> Library:
    """Return the dynamic facts of an opened shared library.

    Raises:
        ElfInvalid: as :func:`read_library`.
    """
    if image.kind != "ET_DYN":
        raise image.invalid(f"is of type {image.kind}", "a shared library is of type ET_DYN")
    table = DynamicTable(image)
    return Library(
        name=image.name,
        soname="".join(table.texts(Tag.SONAME)[:1]),
        needed=table.texts(Tag.NEEDED),
        rpath=":".join(table.texts(Tag.RPATH)),
        runpath=":".join(table.texts(Tag.RUNPATH)),
        symbols=table.symbols,
        unfindable=table.unfindable(),
        version_needs=table.version_needs(),
        spare_slots=table.spare,
        gnu_hash=Tag.GNU_HASH in table,
        sysv_hash=Tag.HASH in table,
        symbolic=table.symbolic,
        prelinked=table.prelinked,
        build_id=_build_id(image),
    )


def read_symtab(path: Path) -> tuple[Symbol, ...]:
    """Return a library's full symbol table (.symtab); empty if it was stripped.

    Raises:
        ElfInvalid: the file is damaged.
    """
    with open_image(path) as image:
        return _symtab(image)


def read_object(path: Path) -> ObjectFile:
    """Read the symbols of an object file.

    Raises:
        ElfInvalid: it is damaged, or no object file.
    """
    with open_image(path) as image:
        _check_object(image)
        symbols = _symtab(image)
        source = next((s.name for s in symbols if s.kind == "FILE" and s.name), "")
        return ObjectFile(image.name, source, tuple(s.name for s in image.sections), symbols)


def read_constant(path: Path, symbol: Symbol) -> bytes:
    """Return the bytes an object file gives a constant; they must need no relocation.

    Args:
        path: the object file.
        symbol: a data symbol of it.

    Raises:
        ElfInvalid: the file is damaged, or the symbol has no bytes in it.
    """
    with open_image(path) as image:
        _check_object(image)
        if not 0 < symbol.section < len(image.sections):
            raise image.invalid(f"has no bytes for {symbol.name}", "a constant lies in a section")
        section = image.sections[symbol.section]
        # SHT_NOBITS: all zero, not in the file.
        if section.kind == SHT_NOBITS or symbol.value + symbol.size > section.size:
            raise image.invalid(
                f"has no bytes for {symbol.name} in {section.name}", "a constant has its bytes there"
            )
        return image.bytes_at(section.offset + symbol.value, symbol.size)


def compilers(path: Path) -> tuple[str, ...]:
    """Return the compilers that made a file, as they say in it ("GCC: (GNU) 12.3.0").

    Empty where that was stripped away.

    Raises:
        ElfInvalid: it is no ELF file, or is damaged.
    """
    with open_image(path) as image:
        section = image.section(".comment")
        if section is None or section.kind == SHT_NOBITS:
            return ()
        text = image.bytes_at(section.offset, section.size).decode("utf-8", "replace")
    return tuple(dict.fromkeys(each for each in text.split("\0") if each))


def glibc_floor(path: Path) -> tuple[int, int]:
    """Return the oldest glibc a library can run on, (2, 17) for instance; (0, 0) if it needs none.

    Raises:
        ElfInvalid: the file is damaged, or wants a version that no release of glibc promises.
    """
    with open_image(path) as image:
        floor = (0, 0)
        for need in DynamicTable(image).version_needs():
            if not need.version.startswith("GLIBC_"):
                continue
            number = _NUMBERED.fullmatch(need.version)
            if number is not None:
                major, minor = (int(part) for part in number[2].split(".")[:2])
                floor = max(floor, (major, minor))
            elif need.version in GLIBC_FEATURES:
                floor = max(floor, GLIBC_FEATURES[need.version])
            else:
                raise image.invalid(
                    f"wants {need.version} of {need.library}",
                    "that name stands for no release of glibc",
                    "Find out which symbol wants it: objdump -T",
                )
        return floor


def required_versions(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the newest version needed of each family: {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 19), ...}.

    Raises:
        ElfInvalid: the file is damaged.
    """
    newest: dict[str, tuple[int, ...]] = {}
    with open_image(path) as image:
        for need in DynamicTable(image).version_needs():
            match = _NUMBERED.fullmatch(need.version)
            if match:
                number = tuple(int(part) for part in match[2].split("."))
                newest[match[1]] = max(newest.get(match[1], ()), number)
    return newest


def _check_object(image: Image) -> None:
    if image.kind != "ET_REL":
        raise image.invalid(
            f"is of type {image.kind}", "an object file is of type ET_REL", "Compile it again"
        )


def _symtab(image: Image) -> tuple[Symbol, ...]:
    table = image.section(".symtab")
    if table is None:
        return ()
    if table.link >= len(image.sections):
        raise image.invalid(f"has a .symtab with string table {table.link}", "there is no such section")
    strings = image.sections[table.link]
    return read_symbols(
        image, table.offset, table.size // SYMBOL_SIZE, image.bytes_at(strings.offset, strings.size)
    )


def _build_id(image: Image) -> str:
    for segment in image.segments:
        if segment.kind != "PT_NOTE":
            continue
        at, end = segment.offset, segment.offset + segment.filesz
        while at + 12 <= end:
            name_size, size, kind = image.unpack("<III", at)
            begin = at + 12 + (name_size + 3) // 4 * 4
            if kind == NT_GNU_BUILD_ID and image.bytes_at(at + 12, name_size) == b"GNU\0":
                return image.bytes_at(begin, size).hex()
            at = begin + (size + 3) // 4 * 4
    return ""
