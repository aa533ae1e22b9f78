"""Busy or hung: when the host of a silent process is asked, and for how long an answer counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multiworld._core.liveness.evidence import Activity

__all__ = ["BusyTracker"]

_FROM = 0.5
"""Share of ``hang_timeout`` in silence after which the host is asked: beats come every fifth of it."""

_EVERY = 0.1
"""Share of ``hang_timeout`` between two questions: several are lost before one is missed."""

_LEAST = 0.05
"""Seconds between two questions, at least."""

_FRESH = 0.5
"""Share of ``hang_timeout`` for which an answer "it runs" counts: the next answer may be late, and a sample
of a tenth of a second may find the process waiting. An answer "it is stopped" revokes it at once."""


@dataclass
class _Asked:
    """Knowledge about one silent process."""

    asked: float = -math.inf
    ran: float = -math.inf
    activity: Activity = Activity.UNKNOWN


class BusyTracker:
    """Questions and answers about silent processes. Times are seconds of one clock.

    Args:
        bound: seconds of silence after which a process that runs counts as hung all the same; 0: nothing is
            asked.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._known: dict[str, _Asked] = {}

    def wake(self, process: str, since: float, limit: float) -> float:
        """Return when to ask about `process`, silent since `since`; `limit` is its hang_timeout."""
        if not self.bound:
            return math.inf
        known = self._known.get(process)
        first = since + _FROM * limit
        return first if known is None else max(first, known.asked + max(_LEAST, _EVERY * limit))

    def ask(self, process: str, now: float) -> None:
        """Record that a question is sent."""
        self._known.setdefault(process, _Asked()).asked = now

    def answered(self, process: str, activity: Activity, now: float) -> None:
        """Record an answer; one without a question is ignored."""
        known = self._known.get(process)
        if known is None or activity is Activity.UNKNOWN:
            return
        known.activity = activity
        if activity is Activity.RUNS:
            known.ran = now
        elif activity is Activity.STOPPED:
            known.ran = -math.inf

    def forget(self, process: str) -> None:
        """Forget a process that was heard or is gone."""
        self._known.pop(process, None)

    def until(self, process: str, since: float, limit: float) -> float:
        """Return until when `process` does not count as hung, given the answers so far."""
        known = self._known.get(process)
        if known is None:
            return since + limit
        return max(since + limit, min(known.ran + _FRESH * limit, since + self.bound))

    def activity(self, process: str) -> Activity:
        """Return the last answer of its host."""
        known = self._known.get(process)
        return Activity.UNKNOWN if known is None else known.activity
