"""Every exception this project raises on purpose.

    MultiworldError
    ├── MarkerError             a patched build's marker cannot be read, or its two halves disagree
    └── BuildError              (in m8d_build.errors) one subclass per way the toolchain can fail

An error carries its parts as fields and builds its own message: the value, the rule it broke, the next step.
"""

from __future__ import annotations

__all__ = ["MarkerError", "MultiworldError"]


class MultiworldError(Exception):
    """Base of all errors of this project.

    Args:
        value: what was found, said so that the reader can find it again.
        rule: what it should have been.
        next_step: what to do about it.
    """

    def __init__(self, value: str, *, rule: str = "", next_step: str = "") -> None:
        self.value = value
        self.rule = rule
        self.next_step = next_step
        super().__init__(value, rule, next_step)

    def __str__(self) -> str:
        parts = [self.value, self.rule, self.next_step]
        return " ".join(part.rstrip(".") + "." for part in parts if part)


class MarkerError(MultiworldError):
    """A torch build's multiworld marker is unreadable, or torch/m8d.json and the library disagree."""
