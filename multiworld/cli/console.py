"""Output of commands: answers to standard output, errors to standard error."""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["UnreadError", "complain", "say"]


class UnreadError(BrokenPipeError):
    """Standard output is a pipe whose reader, ``head`` for example, has closed it: the command ends."""


def say(text: str) -> None:
    """Write lines to standard output, at once; characters that its encoding lacks are escaped.

    Raises:
        UnreadError: no program reads it any more.
    """
    if sys.stdout is None:  # it was closed before the command began
        return
    try:
        try:
            sys.stdout.write(text + "\n")
        except UnicodeEncodeError:  # a path that is not UTF-8, for example
            encoding = sys.stdout.encoding
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        # The interpreter writes what is left when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UnreadError from error


def complain(text: str) -> None:
    """Write lines to standard error; where that cannot be written, an exit code has to tell."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            sys.stderr.write(text + "\n")
