"""Which CUDA and NCCL functions the double must have: those it lacks become stubs that fail and say so."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from bed.errors import BedError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["declared", "defined", "stubs_source", "wanted"]

OURS = re.compile(r"(?:__cuda[A-Z]|cuda[A-Z]|cu[A-Z]|nccl[A-Z])\w*")
# Other libraries' names that look alike.
FOREIGN = re.compile(r"cuFile|cuPVA|cuDSS")
ENTRY = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
UNDEFINED = 0
GLOBAL, WEAK = 1, 2


def is_ours(name: str) -> bool:
    """Tell whether a name belongs to CUDA's runtime, its driver, or NCCL."""
    return bool(OURS.fullmatch(name)) and not FOREIGN.match(name)


def symbols(path: Path) -> tuple[set[str], set[str]]:
    """Return the global names that a library (its dynamic ones) or an object file uses, and those it defines.

    Raises:
        BedError: it is no 64-bit little-endian ELF file, or has no table of names.
    """
    # Not with elftools' own symbol objects: torch has a quarter of a million.
    try:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            table = elf.get_section_by_name(".dynsym") or elf.get_section_by_name(".symtab")
            if table is None or elf.elfclass != 64 or not elf.little_endian:
                raise BedError(
                    f"{path} has no table of names", rule="it must be a 64-bit ELF file for this machine"
                )
            entries, strings = table.data(), elf.get_section(table["sh_link"]).data()
    except ELFError as exc:
        raise BedError(f"{path} is no ELF file: {exc}", next_step="Install its package again") from exc
    used, has = set(), set()
    for name, info, _, section, _, _ in ENTRY.iter_unpack(entries):
        if info >> 4 in (GLOBAL, WEAK):
            text = strings[name : strings.index(b"\0", name)].decode()
            (used if section == UNDEFINED else has).add(text)
    return used, has


def declared(header: str) -> set[str]:
    """Return the functions that cuda.h or nccl.h declares, with what its macros rename them to."""
    functions = re.findall(r"\b(cu[A-Z]\w*|nccl[A-Z]\w*)\s*\(", header)
    renamed = re.findall(
        r"^\s*#\s*define\s+cu[A-Z]\w*\s+(?:__CUDA_API_\w+\()?(cu[A-Z]\w*)", header, re.MULTILINE
    )
    return {name for name in (*functions, *renamed) if is_ours(name)}


def wanted(libraries: Iterable[Path], headers: Iterable[str]) -> set[str]:
    """Return every name that somebody could ask the double for.

    Args:
        libraries: torch's libraries count with what they use; CUDA's and NCCL's with what they define.
        headers: the text of cuda.h and nccl.h: torch finds driver functions by name while it runs.
    """
    names: set[str] = set()
    for library in libraries:
        used, has = symbols(library)
        names |= has if library.name.startswith(("libcudart.", "libnccl.")) else used
    for header in headers:
        names |= declared(header)
    return {name for name in names if is_ours(name)}


def defined(objects: Iterable[Path]) -> set[str]:
    """Return the names that compiled units define."""
    return set().union(*(symbols(path)[1] for path in objects))


def stubs_source(missing: Iterable[str]) -> str:
    """Return the C++ source of functions that say their name, count it, and return an error."""
    lines = [
        "// Generated: what torch or its headers name and the double does not model.",
        'extern "C" {',
        "long m8d_bed_cuda_stub(const char*);",
        "long m8d_bed_nccl_stub(const char*);",
    ]
    for name in sorted(missing):
        library = "nccl" if name.startswith("nccl") else "cuda"
        lines.append(f'long {name}() {{ return m8d_bed_{library}_stub("{name}"); }}')
    return "\n".join([*lines, "}", ""])
