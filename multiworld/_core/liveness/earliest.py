"""Earliest due time in a table of many, so that the table is not looked at before. Pure.

The watchdog's loop asks in each turn what is due. Nearly always nothing is, and with some hundred peers it
costs more to look at every one than all else that the turn does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Earliest"]


class Earliest:
    """A time before which nothing in a table is due.

    What is put off in the table need not be told: then the table is looked at once too often.

    Args:
        exactly: looks at the whole table; returns when something is due first, infinite for never.

    Attributes:
        looks: how often the table was looked at, in `time` or after `passed`.
    """

    def __init__(self, exactly: Callable[[], float]) -> None:
        self._exactly = exactly
        self._time: float | None = math.inf
        self.looks = 0

    @property
    def time(self) -> float:
        """Nothing is due before."""
        if self._time is None:
            self.looks += 1
            self._time = self._exactly()
        return self._time

    def by(self, time: float) -> None:
        """Something is due at `time` now."""
        if self._time is not None and time < self._time:
            self._time = time

    def changed(self) -> None:
        """Anything may be due at any time now: the next question looks at the table."""
        self._time = None

    def passed(self, now: float) -> bool:
        """Whether something may be due; the caller looks at the table then."""
        if now < self.time:
            return False
        self.looks += 1
        return True
