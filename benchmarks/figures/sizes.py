"""Sizes of messages, for people and from them. Pure."""

from __future__ import annotations

import argparse

KB, MB = 1 << 10, 1 << 20


def size_name(size: int) -> str:
    """Bytes for people: "4B", "64KB", "16MB"."""
    for unit, step in (("MB", MB), ("KB", KB)):
        if size >= step:
            return f"{size // step}{unit}"
    return f"{size}B"


def parse_size(text: str) -> int:
    """What `size_name` wrote, in bytes.

    Raises:
        argparse.ArgumentTypeError: it is none, or not a multiple of 4.
    """
    number = text.upper().removesuffix("B")
    step = {"K": KB, "M": MB}.get(number[-1:], 1)
    digits = number.rstrip("KM")
    if not digits.isdigit() or int(digits) * step % 4 or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r}: a size is a multiple of 4 bytes, as in 4B, 64KB or 1MB")
    return int(digits) * step
