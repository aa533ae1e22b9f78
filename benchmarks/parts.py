"""The parts, in order, and how each is loaded."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.measuring.part import Part

PARTS = ("overheads", "latency", "fanin", "worlds", "detection", "rebuild", "toolchain", "peers")
NOT_QUICK = frozenset({"peers"})
"""Parts that download gigabytes: run with --full, by name, or alone."""


def load(name: str) -> Part:
    """The part of that name.

    Raises:
        ImportError: it needs a package that is not installed.
    """
    part: Part = importlib.import_module(f"benchmarks.{name}.part").PART
    return part
