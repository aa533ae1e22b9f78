"""The parts, in order, and how each is loaded."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.measuring.part import Part

PARTS = (
    "overheads", "messages", "collectives", "limits", "hosts", "secure", "fanin", "worlds", "detection",
    "rebuild", "elastic", "growth", "stores", "chaos", "starts", "toolchain", "peers", "thresholds", "paper",
)  # fmt: skip
NOT_QUICK = frozenset({"peers", "stores"})
"""Parts that download gigabytes, or need a server of their own: run with --full, by name, or alone."""
BY_NAME = frozenset({"chaos", "thresholds", "paper"})
"""Parts that take half an hour, say what to set, or have a page of their own: run by name, or alone."""
OWN_PAGE = frozenset({"paper"})
"""Parts that the page of speed leaves to theirs."""


def load(name: str) -> Part:
    """The part of that name.

    Raises:
        ImportError: it needs a package that is not installed.
    """
    part: Part = importlib.import_module(f"benchmarks.{name}.part").PART
    return part
