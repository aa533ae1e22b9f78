"""`RateLimit`: how many lines of one kind a log takes. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["BURST", "EVERY", "RateLimit"]

BURST = 10
"""Lines of one kind that come at once."""

EVERY = 6.0
"""Seconds after which one more may come: ten a minute, as a person can read beside others."""


@dataclass
class _Kind:
    """Lines of one kind.

    Attributes:
        tokens: lines that may come now.
        at: seconds at which `tokens` was right.
        left_out: lines since the last one that came.
    """

    tokens: float
    at: float
    left_out: int = 0


class RateLimit:
    """A token bucket for each kind of line; it forgets the kind that was not used for longest.

    Args:
        burst: lines of one kind that come at once.
        every: seconds after which one more may come.
        kinds: that are known at a time; a forgotten one begins anew.
    """

    def __init__(self, burst: int = BURST, every: float = EVERY, kinds: int = 1024) -> None:
        self._burst = burst
        self._every = every
        self._most = kinds
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def take(self, kind: Hashable, now: float) -> int | None:
        """Return how many lines of the kind were left out since the last one; None: leave this one out, too.

        Args:
            kind: of the line.
            now: seconds of a clock that does not go back.
        """
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Kind(float(self._burst), now)
            if len(self._kinds) > self._most:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        found.tokens = min(self._burst, found.tokens + (now - found.at) / self._every)
        found.at = now
        if found.tokens < 1.0:
            found.left_out += 1
            return None
        found.tokens -= 1.0
        left_out, found.left_out = found.left_out, 0
        return left_out
