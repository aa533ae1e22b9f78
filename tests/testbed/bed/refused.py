"""What the double wrote because it was asked for something it does not model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["refused"]

_LINE = re.compile(r"m8d-bed(?:\[\d+\])?: (STUB|KERNEL) (.+)")
_WORDS = {"STUB": "a function it has only as a stub", "KERNEL": "a kernel it refuses"}


def refused(outputs: Mapping[int, str]) -> list[str]:
    """Return a line for each stub hit and each kernel refused, by rank and each name once."""
    seen = {
        (rank, kind, name.strip()): None
        for rank, text in outputs.items()
        for kind, name in _LINE.findall(text)
    }
    return [f"rank {rank}: {_WORDS[kind]}: {name}" for rank, kind, name in seen]
