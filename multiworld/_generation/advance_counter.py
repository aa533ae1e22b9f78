"""Count of a member's advances, and the one at which it stops because its world changes there."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HEADROOM", "AdvanceCounter"]

HEADROOM = 0.05
"""Seconds that a limit lies ahead, at the pace so far: members agree in less, and none waits."""
MAX_AHEAD = 10_000
"""Advances that a limit lies ahead at most."""

_LOOK_EVERY = 0.05
"""Seconds between two looks at whether the generation still works; decisions wake the waiting thread."""


class AdvanceCounter:
    """Counts, and stops where it was told to.

    Members of a generation enter the next one at the same advance, and none waits for that unless it comes to
    its limit: the background says a limit for this member (`propose`), learns from all limits at which
    advance they enter (`decide`), or that nothing comes of it (`withdraw`).

    Args:
        clock: monotonic seconds.

    Attributes:
        count: of advances so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._before = (0, clock())  # the count some time ago, and when that was
        self._stop = 0  # the advance at which it stops; 0: none
        self._entry = 0  # the one at which it enters; 0: not decided
        self._again = False  # whether the last advance is not over: the next call is for the same one
        self._changed = threading.Condition(threading.Lock())

    def advance(self) -> bool:
        """Count one more, unless the last one was cut off at a stop; return whether it stops there.

        At a stop it is over with `passed`, or `begin`.
        """
        with self._changed:
            # It must not pass its limit before others have agreed on an advance that may be this one.
            self.count += not self._again
            self._again = self.count == self._stop
            return self._again

    def begin(self, count: int) -> None:
        """Begin a generation at `count`, without a stop."""
        with self._changed:
            self.count, self._stop, self._entry, self._again = count, 0, 0, False
            self._before = (count, self._clock())
            self._changed.notify_all()

    def look(self) -> None:
        """Note the pace from here on; called from time to time."""
        self._before = (self.count, self._clock())

    def propose(self) -> int:
        """Return an advance, which this member does not pass before it is decided."""
        with self._changed:
            count, at = self._before
            pace = (self.count - count) / max(self._clock() - at, HEADROOM)
            self._stop = self.count + 1 + min(int(pace * HEADROOM), MAX_AHEAD)
            return self._stop

    def decide(self, entry: int) -> None:
        """Stop at the advance `entry`, at which this member enters the next generation."""
        with self._changed:
            self._stop = self._entry = entry
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Stop nowhere."""
        with self._changed:
            self._stop = self._entry = 0
            self._changed.notify_all()

    def enters(self, works: Callable[[], bool], deadline: float) -> bool:
        """Wait at a stop until it is decided; return whether the next generation is entered here.

        Args:
            works: whether the generation still works; False ends the wait.
            deadline: by the clock.

        Raises:
            TimeoutError: it is not decided at the deadline.
        """
        with self._changed:
            while self._stop and not self._entry and works():
                left = deadline - self._clock()
                if left <= 0:
                    raise TimeoutError(
                        f"advance {self.count}: the members have not agreed on the next generation"
                    )
                self._changed.wait(min(left, _LOOK_EVERY))
            return self._entry == self.count and works()

    def passed(self) -> None:
        """Nothing is entered at this advance: the next call counts one more."""
        with self._changed:
            self._again = False

    def forked(self) -> None:
        """In a forked child: another thread may have held the lock."""
        self._changed = threading.Condition(threading.Lock())
