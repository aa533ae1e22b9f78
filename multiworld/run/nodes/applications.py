"""Numbers of the applications for admission, as the leader reads them from the rendezvous store. Pure.

A node that applies counts a number up and then writes its application under it, in two calls: a higher number
may be there first, and the lower one comes later, or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Applications"]

_AHEAD = 3
"""Numbers beyond the highest one taken that are looked at: an applicant may have died before it wrote."""


class Applications:
    """Which applications are still to be read. Numbers begin with 1."""

    def __init__(self) -> None:
        self._highest = 0
        self._gaps: set[int] = set()  # numbers below the highest that were not there yet

    def due(self) -> list[int]:
        """Return the numbers to look at, in order."""
        return [*sorted(self._gaps), *range(self._highest + 1, self._highest + 1 + _AHEAD)]

    def take(self, numbers: Iterable[int]) -> None:
        """The applications of these numbers were there; they are not due any more."""
        for number in numbers:
            self._gaps.update(range(self._highest + 1, number))
            self._gaps.discard(number)
            self._highest = max(self._highest, number)
