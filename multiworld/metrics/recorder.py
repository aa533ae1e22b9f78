"""Recorder of what happens to this process's worlds since its numbers were first asked for.

One subscription to the process's events counts joins, breakages, recoveries and transfers of state, by world.
A world that was closed and not joined again is forgotten once `KEPT` others have closed after it; its numbers
stay in a sum.
"""

from __future__ import annotations

import functools
import os
import threading
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from multiworld._generation.process_totals import KEPT
from multiworld.events import (
    Cause,
    State,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
    WorldReady,
    WorldStateReceived,
    WorldStuck,
    subscribe,
)
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.events import Breakage, Event

__all__ = ["BROKEN", "STATE_BYTES", "STUCK", "Histogram", "Key", "Record", "Recorder", "recorder"]

Key = tuple[str, str]
"""Of a number: what it counts, and the value of its label; "" where it has none. Joins are counted as
("joins", result), breakages as ("breakages", cause)."""

STUCK: Key = ("stuck", "")
STATE_BYTES: Key = ("state_bytes", "")
BROKEN: Key = ("broken", "")
"""Seconds."""

_JOINS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_RECOVERIES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """How often which durations were seen.

    Args:
        bounds: upper ones of its buckets, seconds, ascending.

    Attributes:
        bounds, sum: as given, and of all that was seen.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return, for each bound and "+Inf", how many took no longer."""
        found, total = [], 0
        for name, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((name, float(total)))
        return found


class Record:
    """One world's numbers.

    Attributes:
        counts: that only rise.
        joining: whether a join is under way; `joining_since` when it began, None if that was not seen.
        broken_at: when it broke; None while it is not broken, or since a member left it in good order.
        closed: whether this process has closed it, and not joined it again.
    """

    __slots__ = ("broken_at", "closed", "counts", "joining", "joining_since", "transfer")

    def __init__(self) -> None:
        self.counts: Counter[Key] = Counter()
        self.joining = False
        self.joining_since: float | None = None
        self.broken_at: float | None = None
        self.closed = False
        self.transfer = 0, -1, 0  # generation, provider, bytes that have been counted

    def broke(self, breakage: Breakage) -> None:
        """It is broken, unless a member left in good order: that one may be done, and never come back."""
        if breakage.cause is not Cause.LEFT:
            self.broken_at = breakage.at

    def until(self, now: float) -> Counter[Key]:
        """Return the counts, with the seconds for which it is broken now."""
        if self.broken_at is None:
            return Counter(self.counts)
        return self.counts + Counter({BROKEN: max(0.0, now - self.broken_at)})


class Recorder:
    """See the module. Any thread.

    Attributes:
        joins: seconds from the begin of a join to the active world.
        recoveries: seconds from a breakage to the active world.
        transfers: seconds for which members waited for the state of another.
    """

    def __init__(self) -> None:
        self._forget: Callable[[], None] | None = None
        self._clear()

    def _clear(self) -> None:
        # A signal's handler may close a world while this is held.
        self._lock = threading.RLock()
        self._worlds: dict[str, Record] = {}
        self._forgotten: Counter[Key] = Counter()
        self.joins = Histogram(_JOINS)
        self.recoveries = Histogram(_RECOVERIES)
        self.transfers = Histogram(_RECOVERIES)

    def begin(self) -> None:
        """Count from now on; harmless when repeated."""
        with self._lock:
            if self._forget is not None:
                return
            for name in registry.joining():
                self._of(name).joining = True
            for name, world in registry.worlds().items():
                record, breakage = self._of(name), world._gen.breakage  # noqa: SLF001  (the handle's own package)
                if breakage is not None and world.state is not State.ACTIVE:
                    record.broke(breakage)
            self._forget = subscribe(self.apply)
            _know_forks()

    def end(self) -> None:
        """Count no more, and forget all."""
        with self._lock:
            if self._forget is not None:
                self._forget()
            self._forget = None
            self._clear()

    def apply(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            self._apply(event, self._of(event.world))

    def records(self, now: float) -> tuple[dict[str, tuple[Counter[Key], float | None]], Counter[Key]]:
        """Return each world's counts and since when it is broken; and the counts of those forgotten."""
        with self._lock:
            found = {name: (each.until(now), each.broken_at) for name, each in self._worlds.items()}
            return found, Counter(self._forgotten)

    # -- inside ----------------------------------------------------------------------------------------------

    def _of(self, world: str) -> Record:
        found = self._worlds.get(world)
        if found is None:
            found = self._worlds[world] = Record()
        return found

    def _apply(self, event: Event, record: Record) -> None:
        counts = record.counts
        if isinstance(event, WorldJoining):
            record.joining, record.joining_since, record.closed = True, event.at, False
        elif isinstance(event, WorldActive):
            self._active(event.at, record)
        elif isinstance(event, WorldJoinFailed):
            counts["joins", "failed"] += 1
            record.joining, record.joining_since = False, None
            if event.world not in registry.worlds():
                self._closed(event.world, record, event.at)
        elif isinstance(event, WorldBroken):
            counts["breakages", event.breakage.cause.value] += 1
            record.broke(event.breakage)
        elif isinstance(event, WorldStuck):
            counts[STUCK] += 1
        elif isinstance(event, WorldStateReceived):
            place = event.generation, event.provider
            before = record.transfer[2] if record.transfer[:2] == place else 0
            # What a transfer begins anew after a lost provider is less than before.
            counts[STATE_BYTES] += max(0, event.received - before)
            record.transfer = (*place, event.received)
        elif isinstance(event, WorldReady):
            if event.provider >= 0:
                self.transfers.observe(event.seconds)
        elif isinstance(event, WorldClosed):
            self._closed(event.world, record, event.at)

    def _active(self, at: float, record: Record) -> None:
        # Without a join: it went on to the next generation at an `advance`.
        record.counts["joins", "active" if record.joining else "advanced"] += 1
        if record.joining_since is not None:
            self.joins.observe(at - record.joining_since)
        if record.broken_at is not None:
            self.recoveries.observe(at - record.broken_at)
        self._whole(record, at)
        record.joining, record.joining_since, record.closed = False, None, False

    def _whole(self, record: Record, at: float) -> None:
        record.counts = record.until(at)
        record.broken_at = None

    def _closed(self, world: str, record: Record, at: float) -> None:
        self._whole(record, at)
        record.closed = True
        # The last one to be closed stands last.
        self._worlds[world] = self._worlds.pop(world)
        closed = [name for name, each in self._worlds.items() if each.closed]
        for name in closed[: max(0, len(closed) - KEPT)]:
            self._forgotten += self._worlds.pop(name).counts


recorder = Recorder()
"""Of this process."""


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=recorder._clear)  # noqa: SLF001  (of this module; the worlds are the parent's)
