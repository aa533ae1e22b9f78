"""Variables that a translation unit constructs at load, or registers for destruction at exit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m8d_build.elf.image import open_image
from m8d_build.elf.read import read_object

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["constructed_at_load"]

SHT_RELA = 4
RELA_WORDS = 3  # offset, info, addend; 8 bytes each
# Where compilers put the functions that run at load: gcc and clang at -O1 and above, and their cold halves.
STARTUP = (".text.startup", ".text._GLOBAL__sub_I")


def constructed_at_load(path: Path) -> frozenset[str]:
    """Return the variables other files may use that this object file's load-time code refers to.

    Two libraries that both hold such a unit would each construct the variable and each register its
    destructor. If they shared one variable, it would be destroyed twice. Variables behind a guard (statics of
    inline functions) are constructed once whoever comes first, and are not meant.

    Args:
        path: an object file, compiled with -O1 or above.

    Raises:
        ElfInvalid: the file is damaged, or no object file.
    """
    symbols = read_object(path).symbols
    names: set[str] = set()
    with open_image(path) as image:
        for section in image.sections:
            if section.kind != SHT_RELA or section.info >= len(image.sections):
                continue
            if not image.sections[section.info].name.startswith(STARTUP):
                continue
            words = image.words("Q", section.offset, section.size // 8)
            for info in words[1::RELA_WORDS]:
                number = info >> 32
                if number >= len(symbols):
                    raise image.invalid(f"has a relocation against symbol {number}", f"it has {len(symbols)}")
                symbol = symbols[number]
                if symbol.kind in {"OBJECT", "TLS"} and symbol.binding == "GLOBAL" and symbol.defined:
                    names.add(symbol.name)
    return frozenset(names)
