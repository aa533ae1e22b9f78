"""Workers that were asked to end: until when they may, and which signal comes next. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from signal import Signals

__all__ = ["Retirements"]


@dataclass(frozen=True)
class _Retirement:
    at: float
    number: Signals | None


class Retirements:
    """Workers that drain: they leave their worlds and end; those that do not get SIGTERM, then SIGKILL.

    Args:
        grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._next: dict[int, _Retirement] = {}

    def __contains__(self, rank: object) -> bool:
        """Whether the worker was asked to end and has not ended yet."""
        return rank in self._next

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the workers that drain."""
        return tuple(self._next)

    def begin(self, rank: int, drain: float, now: float) -> None:
        """Give a worker `drain` seconds from `now` on."""
        self._next[rank] = _Retirement(now + drain, Signals.SIGTERM)

    def ended(self, rank: int) -> None:
        """The worker's process has ended."""
        self._next.pop(rank, None)

    def due(self, now: float) -> list[tuple[int, Signals]]:
        """Return the signals that are due, each once."""
        found = []
        for rank, retirement in self._next.items():
            if retirement.number is not None and now >= retirement.at:
                found.append((rank, retirement.number))
                after = Signals.SIGKILL if retirement.number is Signals.SIGTERM else None
                self._next[rank] = _Retirement(now + self._grace, after)
        return found

    def at(self) -> float:
        """Return when the next signal is due; infinity: never."""
        waiting = (each.at for each in self._next.values() if each.number is not None)
        return min(waiting, default=float("inf"))

    def clear(self) -> None:
        """All workers are ended in another way."""
        self._next.clear()
