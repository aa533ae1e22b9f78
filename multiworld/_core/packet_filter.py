"""Packet filters (classic BPF) for gloo's listeners: which connections they accept. Pure.

A connection that gloo's listener cannot accept (no descriptor is left) ends the process, and one that says a
number which no pair waits for keeps its descriptor for as long as the device lives (gloo's
``transport/tcp/listener.cc``; the same in torch 2.4 to 2.15). So unknown clients must not be accepted. A
filter on the listening socket sees each packet that would open a connection, from its TCP header on. In Linux
the connection comes about with the first packet that the filter lets through after the SYN, so the filter can
wait for what the caller says first, and gloo's own callers say at once which pair they want: 8 bytes.

A connection that comes about inherits the filter, which then would hold up what follows: it is taken off
there.
"""

from __future__ import annotations

import struct

__all__ = ["DROP_ALL", "NUMBER_SIZE", "Instruction", "encode", "pair_numbers"]

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant: ``struct sock_filter`` of linux/filter.h."""

NUMBER_SIZE = 8
"""Bytes of the number that gloo's callers begin with (``sequence_number_t``, as it lies in memory)."""

# linux/bpf_common.h
_LD_BYTE, _LD_WORD_AT_X, _LD_BYTE_AT_X, _LD_LENGTH, _LD_MEMORY = 0x30, 0x40, 0x50, 0x80, 0x60
_LDX_MEMORY, _ST, _TAX, _RET = 0x61, 0x02, 0x07, 0x06
_AND, _LSH, _RSH, _OR_X, _SUB_X = 0x54, 0x64, 0x74, 0x4C, 0x1C
_JEQ, _JGT, _JGE, _JSET = 0x15, 0x25, 0x35, 0x45

_FLAGS, _OFFSET = 13, 12  # bytes of the TCP header
_SYN_OR_RST = 0x06
_HEADER, _SUM = 0, 1  # cells of the filter's memory
_ALL, _NOTHING = 0xFFFFFFFF, 0

DROP_ALL: tuple[Instruction, ...] = ((_RET, 0, 0, _NOTHING),)
"""Lets nothing through: the port seems to be filtered."""


def pair_numbers(lowest: int, highest: int, byteorder: str) -> tuple[Instruction, ...]:
    """Return the filter that lets those connect who say a number from `lowest` to `highest`, and resets.

    Raises:
        ValueError: the numbers are not 0 <= lowest <= highest < 2**32.
    """
    if not 0 <= lowest <= highest <= _ALL:
        raise ValueError(f"numbers {lowest} to {highest}")
    little = byteorder == "little"
    low, high = (0, 4) if little else (4, 0)
    load: list[Instruction] = [(_LD_WORD_AT_X, 0, 0, low)]
    if little:  # the filter loads big-endian numbers: byte by byte, then, the last one first
        load = [(_LD_BYTE_AT_X, 0, 0, low + 3)]
        for at in (2, 1, 0):
            load += [
                (_LSH, 0, 0, 8), (_ST, 0, 0, _SUM),
                (_LDX_MEMORY, 0, 0, _HEADER), (_LD_BYTE_AT_X, 0, 0, low + at),
                (_LDX_MEMORY, 0, 0, _SUM), (_OR_X, 0, 0, 0),
            ]  # fmt: skip
    # What is jumped to are the last two instructions; distances are counted from the instruction behind the
    # jump.
    body: list[Instruction | tuple[int, str, int]] = [
        (_LD_BYTE, 0, 0, _FLAGS),
        (_JSET, "accept if true", _SYN_OR_RST),
        (_LD_BYTE, 0, 0, _OFFSET), (_AND, 0, 0, 0xF0), (_RSH, 0, 0, 2),
        (_ST, 0, 0, _HEADER), (_TAX, 0, 0, 0),
        (_LD_LENGTH, 0, 0, 0), (_SUB_X, 0, 0, 0),
        (_JGE, "drop if false", NUMBER_SIZE),
        (_LD_WORD_AT_X, 0, 0, high),
        (_JEQ, "drop if false", 0),
        *load,
        (_JGE, "drop if false", lowest),
        (_JGT, "drop if true", highest),
    ]  # fmt: skip
    program: list[Instruction] = []
    for at, each in enumerate(body):
        if len(each) == 4:
            program.append(each)
        else:
            code, where, constant = each
            accept, drop = len(body) - at - 1, len(body) - at
            jumps = {"accept if true": (accept, 0), "drop if false": (0, drop), "drop if true": (drop, 0)}
            program.append((code, *jumps[where], constant))
    return (*program, (_RET, 0, 0, _ALL), (_RET, 0, 0, _NOTHING))


def encode(program: tuple[Instruction, ...]) -> bytes:
    """Return a program as it lies in memory."""
    return b"".join(struct.pack("=HBBI", *each) for each in program)
