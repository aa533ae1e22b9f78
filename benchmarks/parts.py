"""The parts, in order, and how each is loaded."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.measuring.part import Part

PARTS = (
    "overheads", "messages", "collectives", "limits", "hosts", "secure", "fanin", "worlds", "detection",
    "rebuild", "elastic", "growth", "toolchain", "peers", "thresholds",
)  # fmt: skip
NOT_QUICK = frozenset({"peers"})
"""Parts that download gigabytes: run with --full, by name, or alone."""
BY_NAME = frozenset({"thresholds"})
"""Parts that say what to set, not what something costs: run by name, or alone."""


def load(name: str) -> Part:
    """The part of that name.

    Raises:
        ImportError: it needs a package that is not installed.
    """
    part: Part = importlib.import_module(f"benchmarks.{name}.part").PART
    return part
