"""What commands write: answers to standard output, errors to standard error."""

from __future__ import annotations

import sys

__all__ = ["complain", "say"]


def say(text: str) -> None:
    """Write lines to standard output."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """Write lines to standard error."""
    sys.stderr.write(text + "\n")
