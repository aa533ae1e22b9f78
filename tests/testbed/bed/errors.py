from __future__ import annotations

__all__ = ["BedError"]


class BedError(Exception):
    """The test bed cannot do what it was asked: what was found, what it should have been, what to do.

    Args:
        value: what was found.
        rule: what it should have been.
        next_step: what to do about it.
    """

    def __init__(self, value: str, *, rule: str = "", next_step: str = "") -> None:
        self.value = value
        self.rule = rule
        self.next_step = next_step
        super().__init__(". ".join(part.rstrip(".") for part in (value, rule, next_step) if part) + ".")
