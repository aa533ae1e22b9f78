"""Dialing: which process connects to which, and when; one connection per pair.

The process with the smaller id dials. The other one waits, and after a while *knocks*: it dials too, but only
to learn whether its generation is over. Members of a newer generation do not dial it, so it would wait until
its deadline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GONE_AFTER", "Dialing"]

GONE_AFTER = 1.0
"""Seconds of refused connections after which a process counts as gone: it listened before it was in a
roster."""

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.25
_KNOCK_AFTER = 0.5


@dataclass
class _Target:
    at: float
    pause: float = _FIRST_PAUSE
    busy: bool = False
    attempts: int = 0
    refused_since: float | None = None


class Dialing:
    """Processes to which this one (id `own`) needs a connection and has none."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._targets: dict[str, _Target] = {}

    def want(self, process: str, now: float) -> None:
        """A connection to `process` is needed."""
        if process not in self._targets:
            self._targets[process] = _Target(now if self._own < process else now + _KNOCK_AFTER)

    def drop(self, process: str) -> None:
        """Stop dialing: the connection exists, or is not needed any more."""
        self._targets.pop(process, None)

    def due(self, now: float) -> list[tuple[str, int]]:
        """Return the processes to dial now, with the number of the attempt, and mark them as being dialed."""
        due = [(process, each) for process, each in self._targets.items() if not each.busy and each.at <= now]
        for _, target in due:
            target.busy = True
            target.attempts += 1
        return [(process, target.attempts - 1) for process, target in due]

    def connected(self, process: str) -> None:
        """The TCP handshake with `process` succeeded."""
        target = self._targets.get(process)
        if target is not None:
            target.refused_since = None

    def ended(self, process: str, now: float, *, refused: bool) -> None:
        """A connection that was dialed ended before it was trusted; `refused`: its port is closed."""
        target = self._targets.get(process)
        if target is None:
            return
        target.busy = False
        target.at = now + (target.pause if self._own < process else max(target.pause, _KNOCK_AFTER))
        target.pause = min(target.pause * 2, _LONGEST_PAUSE)
        if not refused:
            target.refused_since = None
        elif target.refused_since is None:
            target.refused_since = now

    def gone(self, now: float) -> list[str]:
        """Return the processes that refused every connection for a second."""
        return [
            process
            for process, each in self._targets.items()
            if each.refused_since is not None and now - each.refused_since >= GONE_AFTER
        ]

    def wake(self) -> float:
        """Return when `due` is not empty next; infinite for never."""
        return min((each.at for each in self._targets.values() if not each.busy), default=math.inf)
