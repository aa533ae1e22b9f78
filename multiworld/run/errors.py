"""Errors of the launcher.

RunError                the launcher cannot do what it was asked (exit code 2 when an argument is to blame)
├── ArgumentsError      an option's value breaks a rule
└── PlanError           a worlds file is wrong; ``.path`` and ``.line`` say where
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["WRONG", "ArgumentsError", "PlanError", "RunError", "starting_workers", "used_up"]

WRONG = 2
"""Exit code for wrong arguments, as argparse has it, and for each other `RunError`."""

_USED_UP = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
_SAID = {"can't start new thread", "Failed to create a socket", "Failed to init uv loop"}
"""Texts of RuntimeErrors that have no number: of Python, and of torch where no descriptor is left."""


class RunError(MultiworldError):
    """The launcher cannot do what it was asked."""


class ArgumentsError(RunError):
    """An option's value breaks a rule."""


class PlanError(RunError):
    """A worlds file is wrong.

    The string begins with ``path:line:`` (without the line if no single line is wrong).


    Args:
        value: the wrong value.
        path: of the file; "" without a file.
        line: counted from 1; 0 if no single line is wrong.
        rule, next_step: as for `MultiworldError`.
    """

    def __init__(
        self, value: str, *, path: str = "", line: int = 0, rule: str = "", next_step: str = ""
    ) -> None:
        self.path = path
        self.line = line
        super().__init__(value, rule=rule, next_step=next_step)

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}: " if self.line else f"{self.path}: " if self.path else ""
        return where + super().__str__()


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Start workers in here.

    Raises:
        RunError: the system could not start one.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"a worker could not be started: {error}",
            rule="The program is there and may be run, and the host has room for its process and its logs",
            next_step="Correct the path that the error names, or free what it says is used up",
        ) from error


def used_up(error: Exception) -> bool:
    """Whether the host, or this user, has no descriptor, process, thread, memory or disk left."""
    return getattr(error, "errno", None) in _USED_UP or str(error) in _SAID
