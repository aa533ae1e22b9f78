"""What commands write: answers to standard output, errors to standard error."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["complain", "say"]


def say(text: str, *, now: bool = False) -> None:
    """Write lines to standard output; `now`: though it is no terminal."""
    sys.stdout.write(text + "\n")
    if now:
        sys.stdout.flush()


def complain(text: str) -> None:
    """Write lines to standard error; where that cannot be written, an exit code has to tell."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            sys.stderr.write(text + "\n")
