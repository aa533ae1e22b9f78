"""The bytes of one x86-64 ELF file: headers through pyelftools, every access bounds-checked."""

from __future__ import annotations

import io
import mmap
import struct
from array import array
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from elftools.elf.elffile import ELFFile

from m8d_build.errors import ElfInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Image", "Section", "Segment", "open_image"]

EHDR_SIZE, PHDR_SIZE, SHDR_SIZE, DYN_SIZE = 64, 56, 64, 16  # ELF-64, gABI chapter 4 and 5
SHT_NOBITS = 8
WHOLE = "Get the file again from where it came; compare its sha256"


@dataclass(frozen=True)
class Segment:
    """One program header.

    Attributes:
        kind: "PT_LOAD", "PT_DYNAMIC", ...
        offset: of its bytes in the file.
        vaddr: where they are in memory, before relocation.
        filesz: how many bytes the file has.
        memsz: how many bytes memory has.
        flags: 1 executable, 2 writable, 4 readable.
    """

    kind: str
    offset: int
    vaddr: int
    filesz: int
    memsz: int
    flags: int


@dataclass(frozen=True)
class Section:
    """One section header.

    Attributes:
        name: ".text".
        kind: number of its type (SHT_*), in ELF's own numbering.
        flags: SHF_* bits (2 allocated, 4 executable).
        addr: virtual address, 0 if it is not loaded.
        offset: of its bytes in the file.
        size: in bytes.
        link: number of the section it refers to.
        info: extra number, its meaning depends on the type.
    """

    name: str
    kind: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int


class Image:
    """An ELF file's bytes and headers.

    Args:
        data: the whole file.
        name: what to call it in messages.

    Attributes:
        kind: "ET_DYN" (shared library), "ET_REL" (object file), ...
        segments: program headers in file order.
        sections: section headers in file order; empty if the file has none.

    Raises:
        ElfInvalid: no ELF file, truncated, damaged, 32-bit, big-endian, or not for x86-64.
    """

    def __init__(self, data: bytes | mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self._check_identity()
        with self._foreign_errors():
            elf = ELFFile(cast("IO[bytes]", data if isinstance(data, mmap.mmap) else io.BytesIO(data)))
            header = elf.header
        self.kind = str(header["e_type"])
        if header["e_machine"] != "EM_X86_64":
            raise self.invalid(f"is for machine {header['e_machine']}", "only x86-64 is handled")
        self._check_tables(header)
        with self._foreign_errors():
            self.segments = tuple(_segment(s.header) for s in elf.iter_segments())
            # Only after the table is known to lie in the file: pyelftools trusts the number of sections.
            count = elf.num_sections() if header["e_shoff"] else 0
        self._check_range("the section headers", header["e_shoff"], count * SHDR_SIZE)
        with self._foreign_errors():
            self.sections = tuple(_section(s.name, s.header) for s in elf.iter_sections()) if count else ()
        for segment in self.segments:
            if segment.kind == "PT_LOAD":
                self._check_range("a loaded segment", segment.offset, segment.filesz)
        for section in self.sections:
            if section.kind not in {0, SHT_NOBITS}:
                self._check_range(f"section {section.name}", section.offset, section.size)

    def invalid(self, what: str, rule: str = "", next_step: str = WHOLE) -> ElfInvalid:
        """Return (not raise) the error for this file."""
        return ElfInvalid(f"{self.name} {what}", rule=rule, next_step=next_step)

    def unpack(self, layout: str, offset: int) -> tuple[Any, ...]:
        """Return the values of a struct layout at a file offset.

        Raises:
            ElfInvalid: it reaches past the end of the file.
        """
        self._check_range("a structure", offset, struct.calcsize(layout))
        return struct.unpack_from(layout, self.data, offset)

    def words(self, typecode: str, offset: int, count: int) -> array[int]:
        """Return ``count`` little-endian numbers ("H" 2, "I" 4, "Q" 8 bytes each) from a file offset.

        Raises:
            ElfInvalid: they reach past the end of the file.
        """
        numbers = array(typecode)
        self._check_range("a table", offset, count * numbers.itemsize)
        numbers.frombytes(self.data[offset : offset + count * numbers.itemsize])
        return numbers  # x86-64 only: the file's byte order is the machine's own

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from a file offset.

        Raises:
            ElfInvalid: they reach past the end of the file.
        """
        self._check_range("a range", offset, size)
        return bytes(self.data[offset : offset + size])

    def overwrite(self, offset: int, new: bytes) -> None:
        """Change bytes in memory; only for an image opened as scratch, whose file stays as it is.

        Raises:
            ElfInvalid: they reach past the end of the file.
            TypeError: the image is not a scratch one.
        """
        self._check_range("a change", offset, len(new))
        if not isinstance(self.data, mmap.mmap):
            raise TypeError("only a scratch image can be changed")
        self.data[offset : offset + len(new)] = new

    def offset_of(self, vaddr: int, size: int = 1) -> int:
        """Return the file offset of a virtual address.

        Raises:
            ElfInvalid: no loaded segment has these bytes in the file.
        """
        for segment in self.segments:
            inside = vaddr - segment.vaddr
            if segment.kind == "PT_LOAD" and inside >= 0 and inside + size <= segment.filesz:
                return segment.offset + inside
        raise self.invalid(f"names address {vaddr:#x}", "no loaded segment has it")

    def section(self, name: str) -> Section | None:
        """Return the first section of that name."""
        return next((s for s in self.sections if s.name == name), None)

    def dynamic(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return where .dynamic is in the file, and all its slots as (tag, value), spare ones at the end included.

        Raises:
            ElfInvalid: there is none: the file is no shared library.
        """
        segment = next((s for s in self.segments if s.kind == "PT_DYNAMIC"), None)
        if segment is None:
            raise self.invalid("has no dynamic segment", "it must be a shared library")
        flat = self.words("Q", segment.offset, segment.filesz // DYN_SIZE * 2)
        slots = tuple(zip(flat[::2], flat[1::2], strict=True))
        if all(tag for tag, _ in slots):
            raise self.invalid("has a .dynamic without an end", "its last slot must be DT_NULL")
        return segment.offset, slots

    def _check_identity(self) -> None:
        head = bytes(self.data[:EHDR_SIZE])
        if head[:4] != b"\x7fELF":
            raise self.invalid(f"begins with {head[:4]!r}", "an ELF file begins with b'\\x7fELF'")
        if len(head) < EHDR_SIZE:
            raise self.invalid(f"has {len(head)} bytes", f"an ELF header has {EHDR_SIZE}")
        if head[4] != 2 or head[5] != 1:
            raise self.invalid(
                f"has class {head[4]} and byte order {head[5]}",
                "only 64-bit (2) little-endian (1) is handled",
            )

    def _check_tables(self, header: Any) -> None:
        for what, offset, count, size, wanted in (
            ("program headers", header["e_phoff"], header["e_phnum"], header["e_phentsize"], PHDR_SIZE),
            ("section headers", header["e_shoff"], header["e_shnum"], header["e_shentsize"], SHDR_SIZE),
        ):
            # Section counts past 65279 stand in section 0; its own header must be there to say so.
            rows = max(count, 1) if offset and what == "section headers" else count
            if rows and size != wanted:
                raise self.invalid(f"has {what} of {size} bytes", f"they have {wanted}")
            self._check_range(f"the {what}", offset, rows * wanted)

    def _check_range(self, what: str, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > len(self.data):
            raise self.invalid(
                f"has {len(self.data)} bytes, {what} would need bytes {offset} to {offset + size}",
                "the file is truncated or damaged",
            )

    @contextmanager
    def _foreign_errors(self) -> Iterator[None]:
        try:
            yield
        except ElfInvalid:
            raise
        except Exception as exc:
            # pyelftools answers damage with its own, construct's, struct's, Unicode, key, index and assertion
            # errors.
            raise self.invalid(
                f"cannot be read: {type(exc).__name__}: {exc}", "its headers are damaged"
            ) from exc


@contextmanager
def open_image(path: Path, *, scratch: bool = False) -> Iterator[Image]:
    """Map a file and read its headers; only the pages looked at are read.

    Args:
        path: the file.
        scratch: map it so that :meth:`Image.overwrite` can change it in memory; the file stays as it is.

    Raises:
        ElfInvalid: it cannot be opened, is empty, or is no ELF file we handle.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY if scratch else mmap.ACCESS_READ)
    except ValueError as exc:
        raise ElfInvalid(f"{path} is empty", rule="it must be an ELF file", next_step=WHOLE) from exc
    except OSError as exc:
        raise ElfInvalid(
            f"{path} cannot be read: {exc.strerror}", next_step="Check path and permissions"
        ) from exc
    with mapped:
        yield Image(mapped, str(path))


def _segment(raw: Any) -> Segment:
    return Segment(
        str(raw["p_type"]), raw["p_offset"], raw["p_vaddr"], raw["p_filesz"], raw["p_memsz"], raw["p_flags"]
    )


def _section(name: str, raw: Any) -> Section:
    kind = raw["sh_type"]
    number = _SECTION_KINDS.get(kind, -1) if isinstance(kind, str) else int(kind)
    return Section(
        name,
        number,
        raw["sh_flags"],
        raw["sh_addr"],
        raw["sh_offset"],
        raw["sh_size"],
        raw["sh_link"],
        raw["sh_info"],
    )


# Those that are looked at; pyelftools gives names for types it knows.
_SECTION_KINDS = {"SHT_NULL": 0, "SHT_PROGBITS": 1, "SHT_SYMTAB": 2, "SHT_STRTAB": 3, "SHT_RELA": 4, "SHT_NOBITS": 8,
                  "SHT_DYNSYM": 11}  # fmt: skip
