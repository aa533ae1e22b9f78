"""Progress of a command that reads a large file, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["reading"]

_EVERY = 0.5
"""Seconds between two lines."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how much of a file was read: on a terminal, and where that takes its time."""
    shown, next_at = False, time.monotonic() + _EVERY

    def progress(done: int, total: int) -> None:
        nonlocal shown, next_at
        if sys.stderr.isatty() and time.monotonic() >= next_at:
            next_at = time.monotonic() + _EVERY
            shown = True
            sys.stderr.write(f"\r{path.name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB ")
            sys.stderr.flush()

    try:
        yield progress
    finally:
        if shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
