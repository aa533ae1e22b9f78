"""What the double wrote because it was asked for something it does not model, or that NCCL does not survive."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["outlived", "refused"]

_LINE = re.compile(r"m8d-bed(?:\[\d+\])?: (STUB|KERNEL|LIFETIME|LUCK) (.+)")
_WORDS = {"STUB": "a function it has only as a stub", "KERNEL": "a kernel it refuses"}


def refused(outputs: Mapping[int, str]) -> list[str]:
    """Return a line for each stub hit and each kernel refused, by rank and each name once."""
    return [f"rank {rank}: {_WORDS[kind]}: {name}" for rank, kind, name in _seen(outputs) if kind in _WORDS]


def outlived(outputs: Mapping[int, str], *, luck: bool = False) -> list[str]:
    """Return a line for each use of memory that NCCL has freed, or may have, by rank and each once.

    Args:
        outputs: by rank.
        luck: leave out what NCCL itself refuses as long as the memory is not used again, as official torch relies on.
    """
    wanted = {"LIFETIME"} if luck else {"LIFETIME", "LUCK"}
    return [f"rank {rank}: {what}" for rank, kind, what in _seen(outputs) if kind in wanted]


def _seen(outputs: Mapping[int, str]) -> dict[tuple[int, str, str], None]:
    return {
        (rank, kind, name.strip()): None
        for rank, text in outputs.items()
        for kind, name in _LINE.findall(text)
    }
