"""Operand check, by the disassembler (objdump): whether bytes that look like a reference are an operand.

A library of a gigabyte has enough code for chance hits: the end of one instruction and the beginning of the
next can look like a call. Only the function around such a place is disassembled, so it takes milliseconds.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.errors import CommandFailed

if TYPE_CHECKING:
    from m8d_build.elf.references import Reference

__all__ = ["is_operand"]

# A line: an address, a tab, the bytes, a tab, the instruction with its operands.
_LINE = re.compile(r"^\s*([0-9a-f]+):\t((?:[0-9a-f]{2} )+)\s*(.*)$", re.MULTILINE)
_NUMBER = re.compile(r"0x([0-9a-f]+)")
DISPLACEMENT = 4  # bytes
TIMEOUT = 60.0  # seconds; a function takes some milliseconds


def is_operand(reference: Reference, code: bytes, address: int, scratch: Path) -> bool:
    """Tell whether a reference found by its bytes is the operand of an instruction.

    Args:
        reference: what was found.
        code: of the whole function it lies in; its first byte begins an instruction.
        address: of that byte.
        scratch: folder for a file with it.

    Returns:
        True also where it cannot be told, as there is no disassembler (binutils' ``objdump``), or data among
        the
        code: what cannot be refuted stands.
    """
    with tempfile.TemporaryDirectory(prefix="m8d-code-", dir=scratch) as folder:
        file = Path(folder, "code")
        file.write_bytes(code)
        command: list[str | Path] = ["objdump", "-D", "-w", "-b", "binary", "-m", "i386:x86-64"]
        command += [f"--adjust-vma={address:#x}", file]
        try:
            shown = proc.run(command, what="disassemble a function", timeout=TIMEOUT).stdout
        except CommandFailed:
            return True
    if "(bad)" in shown:  # not all of it is code, so where instructions begin is not certain either
        return True
    for begin, octets, text in _LINE.findall(shown):
        first = int(begin, 16)
        end = first + len(octets.split())
        if first < reference.at and reference.at + DISPLACEMENT <= end:
            return reference.target in {int(number, 16) for number in _NUMBER.findall(text)}
    return False
