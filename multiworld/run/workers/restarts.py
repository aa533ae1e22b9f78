"""Restart policy: whether and when a failed worker is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Restart", "Restarts"]


@dataclass(frozen=True)
class Restart:
    """A worker will be started again.

    Attributes:
        delay: seconds until then; 0: at once.
        attempt: number of the coming start (0 was the first).
        left: restarts that remain after this one.
    """

    delay: float
    attempt: int
    left: int


class Restarts:
    """Restart counts and backoff of all workers.

    A worker that had come up is started again at once. One that had not is started again at once the first
    time, then after `backoff` seconds, twice as much, and so on up to `backoff_max`.

    Args:
        max_restarts: for each worker, over the whole run; at least 0.
        backoff: seconds before the second restart in a row of a worker that does not come up.
        backoff_max: seconds that no delay exceeds.
    """

    def __init__(self, max_restarts: int, backoff: float, backoff_max: float) -> None:
        self.max_restarts = max_restarts
        self._backoff = backoff
        self._backoff_max = backoff_max
        self._attempts: dict[int, int] = {}
        self._row: dict[int, int] = {}

    def attempt(self, rank: int) -> int:
        """Number of the worker's latest start; 0: the first."""
        return self._attempts.get(rank, 0)

    def total(self) -> int:
        """Restarts of all workers so far."""
        return sum(self._attempts.values())

    def failed(self, rank: int, *, came_up: bool) -> Restart | None:
        """Decide on a failed worker; None: it has no restarts left.

        Args:
            rank: the worker's.
            came_up: whether this attempt worked before it failed.

        """
        attempt = self.attempt(rank) + 1
        if attempt > self.max_restarts:
            return None
        self._attempts[rank] = attempt
        row = self._row[rank] = 0 if came_up else self._row.get(rank, 0) + 1
        return Restart(self._delay(row), attempt, self.max_restarts - attempt)

    def _delay(self, row: int) -> float:
        if row < 2:
            return 0.0
        # The exponent is bounded: 2.0**1100 is an error, and no delay needs it.
        return float(min(self._backoff_max, self._backoff * 2.0 ** min(row - 2, 60)))
