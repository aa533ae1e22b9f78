"""Errors of the launcher.

RunError                the launcher cannot do what it was asked (exit code 2 when an argument is to blame)
├── ArgumentsError      an option's value breaks a rule
└── PlanError           a worlds file is wrong; ``.path`` and ``.line`` say where
"""

from __future__ import annotations

from multiworld.errors import MultiworldError

__all__ = ["ArgumentsError", "PlanError", "RunError"]


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
