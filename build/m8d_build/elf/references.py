"""References to an address that bypass the dynamic linker: calls, jumps, rip-relative operands, pointers.

Code is not disassembled. Every four bytes that could be the displacement of such an operand are tried, at any
position, so nothing can be missed; what is found is a reference only if the bytes before it can end an opcode
that takes one, which leaves chance hits out but for about one in a hundred million bytes per thousand
targets.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from m8d_build.elf.image import Image

__all__ = ["Reference", "code_references", "pointer_references"]

PF_X = 1
DT_RELA, DT_RELASZ, DT_RELR = 7, 8, 36
R_X86_64_RELATIVE, R_X86_64_IRELATIVE = 8, 37
CHUNK = 1 << 18  # bytes of code looked at with one pattern
CLUSTER = 1 << 20  # targets closer than this share a pattern
TRAILING = (0, 1, 2, 4)  # bytes of immediate operand that may stand between displacement and next instruction


@dataclass(frozen=True)
class Reference:
    """One reference.

    Attributes:
        at: address of the displacement or pointer.
        target: address it refers to, one of those asked for.
    """

    at: int
    target: int


def code_references(image: Image, targets: Mapping[int, object]) -> Iterator[Reference]:
    """Yield every direct call or jump to, and every rip-relative operand at, one of the addresses.

    Args:
        image: the library.
        targets: addresses, as the keys.

    Raises:
        ElfInvalid: the file is damaged.
    """
    clusters = _clusters(targets)
    for segment in image.segments:
        if segment.kind != "PT_LOAD" or not segment.flags & PF_X:
            continue
        for begin in range(0, segment.filesz, CHUNK):
            size = min(CHUNK, segment.filesz - begin)
            # Two bytes before for the opcode, three after for a displacement that begins in the last one.
            before, after = min(begin, 2), min(3, segment.filesz - begin - size)
            code = image.bytes_at(segment.offset + begin - before, before + size + after)
            yield from _scan(code, segment.vaddr + begin - before, targets, clusters)


def pointer_references(image: Image, targets: Mapping[int, object]) -> Iterator[Reference]:
    """Yield every pointer in data that is set to one of the addresses when the library is loaded.

    Raises:
        ElfInvalid: the file is damaged, or packs its relocations in a way that is not read here (DT_RELR).
    """
    _, slots = image.dynamic()
    tags = dict(reversed(slots))
    if DT_RELR in tags:
        raise image.invalid(
            "has packed relocations (DT_RELR)", "they are not read here", "Use --mode full for this wheel"
        )
    size = tags.get(DT_RELASZ, 0) // 24 * 24
    if not size:
        return
    table = image.bytes_at(image.offset_of(tags[DT_RELA], size), size)
    for at, info, addend in struct.iter_unpack("<QQq", table):
        if info & 0xFFFFFFFF in {R_X86_64_RELATIVE, R_X86_64_IRELATIVE} and addend in targets:
            yield Reference(at, addend)


def _scan(
    code: bytes, address: int, targets: Mapping[int, object], clusters: list[tuple[int, int]]
) -> Iterator[Reference]:
    for low, high in clusters:
        # The displacement counts from the end of the instruction: 4 to 8 bytes after its own address.
        pattern = _displacements(low - (address + len(code)) - 8, high - address - 4)
        for match in pattern.finditer(code, 3):
            at = match.start() - 2
            end = int.from_bytes(code[at : at + 4], "little", signed=True) + address + at + 4
            for trailing in TRAILING:
                if end + trailing in targets and _takes_displacement(code, at, trailing):
                    yield Reference(address + at, end + trailing)
                    break


def _takes_displacement(code: bytes, at: int, trailing: int) -> bool:
    one, two = code[at - 1], code[at - 2] if at >= 2 else 0
    if trailing == 0 and (one in {0xE8, 0xE9} or (two == 0x0F and one & 0xF0 == 0x80)):
        return True  # call, jmp, jcc
    return one & 0xC7 == 0x05  # a ModRM byte that says rip-relative


def _displacements(low: int, high: int) -> re.Pattern[bytes]:
    """Match at the third byte of any four that are a number from low to high (or little outside)."""
    seconds: dict[int, set[int]] = {}
    for upper in range(low >> 16, (high >> 16) + 1):
        seconds.setdefault(upper >> 8 & 0xFF, set()).add(upper & 0xFF)
    firsts: dict[frozenset[int], set[int]] = {}
    for last, third in seconds.items():
        firsts.setdefault(frozenset(third), set()).add(last)
    return re.compile(
        b"(?=" + b"|".join(_one_of(t) + _one_of(ls) for t, ls in firsts.items()) + b")", re.DOTALL
    )


def _one_of(values: frozenset[int] | set[int]) -> bytes:
    return b"[" + b"".join(b"\\x%02x" % value for value in sorted(values)) + b"]"


def _clusters(targets: Mapping[int, object]) -> list[tuple[int, int]]:
    clusters: list[tuple[int, int]] = []
    for address in sorted(targets):
        if clusters and address - clusters[-1][1] < CLUSTER:
            clusters[-1] = (clusters[-1][0], address)
        else:
            clusters.append((address, address))
    return clusters
