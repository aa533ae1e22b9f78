"""Symbol tables as plain records, read in one sweep: the real ones have a hundred thousand entries."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from m8d_build.elf.image import Image

__all__ = ["ABSOLUTE", "LINKER_SYMBOLS", "SYMBOL_SIZE", "UNDEFINED", "Symbol", "read_symbols"]

SYMBOL_SIZE = 24
UNDEFINED, ABSOLUTE = 0, 0xFFF1
# Every shared library has its own; some linkers export them.
LINKER_SYMBOLS = frozenset({"_init", "_fini", "_edata", "_end", "__bss_start"})
_LAYOUT = struct.Struct("<IBBHQQ")
_BINDINGS = {0: "LOCAL", 1: "GLOBAL", 2: "WEAK", 10: "UNIQUE"}
_KINDS = {0: "NOTYPE", 1: "OBJECT", 2: "FUNC", 3: "SECTION", 4: "FILE", 5: "COMMON", 6: "TLS", 10: "IFUNC"}
_VISIBILITIES = ("DEFAULT", "INTERNAL", "HIDDEN", "PROTECTED")


class Symbol(NamedTuple):
    """One entry of a symbol table; a tuple, which is made several times faster than a dataclass.

    Attributes:
        number: its place in the table.
        name: mangled, "" for sections.
        value: address (in an object file: offset in its section).
        size: bytes.
        binding: "LOCAL", "GLOBAL", "WEAK" or "UNIQUE" (STB_GNU_UNIQUE); "?n" for numbers without a name.
        kind: "FUNC", "OBJECT", "TLS", "IFUNC", "NOTYPE", "SECTION", "FILE", "COMMON"; "?n" likewise.
        visibility: "DEFAULT", "HIDDEN", "PROTECTED", "INTERNAL".
        section: number of its section; 0 is undefined.
        version: name of its symbol version ("GLIBC_2.14"), "" if it has none.
        file: for local symbols the source file named before them, "" if none is: hidden globals that the
            linker made local come last, under no name.
        group: number of that file's own symbol, which tells files of one name apart; 0 if there is none.
    """

    number: int
    name: str
    value: int
    size: int
    binding: str
    kind: str
    visibility: str
    section: int
    version: str = ""
    file: str = ""
    group: int = 0

    @property
    def defined(self) -> bool:
        """Whether this file has it, and does not merely want it."""
        return self.section != UNDEFINED

    @property
    def strong(self) -> bool:
        """Whether it is a definition of which a program has only one."""
        return self.binding == "GLOBAL" and self.section != UNDEFINED


def read_symbols(
    image: Image, offset: int, count: int, strings: bytes, versions: Sequence[str] = ()
) -> tuple[Symbol, ...]:
    """Read a symbol table.

    Args:
        image: the file.
        offset: where the table begins.
        count: entries, entry 0 included.
        strings: the string table.
        versions: each symbol's version name, or empty.

    Raises:
        ElfInvalid: the table or a name reaches past its end.
    """
    symbols: list[Symbol] = []
    file, group = "", 0
    find = strings.find
    for index, (at, info, other, section, value, size) in enumerate(
        _LAYOUT.iter_unpack(image.bytes_at(offset, count * SYMBOL_SIZE))
    ):
        end = find(b"\0", at)
        if end < 0:
            raise image.invalid(
                f"has a symbol {index} whose name begins at {at}", "names end inside the string table"
            )
        name = strings[at:end].decode("utf-8", "surrogateescape")
        binding = _BINDINGS.get(info >> 4) or f"?{info >> 4}"
        kind = _KINDS.get(info & 15) or f"?{info & 15}"
        local = binding == "LOCAL"
        if kind == "FILE":
            # crtstuff.c is the last file linked; old linkers put hidden globals under it.
            file, group = ("", 0) if name in {"", "crtstuff.c"} else (name, index)
        symbols.append(
            Symbol(
                index,
                name,
                value,
                size,
                binding,
                kind,
                _VISIBILITIES[other & 3],
                section,
                versions[index] if versions else "",
                file if local else "",
                group if local else 0,
            )
        )
    return tuple(symbols)
