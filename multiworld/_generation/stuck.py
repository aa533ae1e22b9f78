"""Notices operations that wait for long, asks the other members what they do, and tells who is missing.

One thread for all worlds of the process looks at the logs of their operations; it exists while there are
worlds. What is asked and told then has a thread of a pool.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Protocol

from multiworld import settings
from multiworld._c10d.waiter_pool import ending
from multiworld._core.operations.log import GROUP, KIND, NUMBER, PEER, TAG
from multiworld.events import WorldStuck, bus
from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiworld._core.operations.log import Entry
    from multiworld._generation.operations import GenerationOperations
    from multiworld.pending import PendingOperation

__all__ = ["StuckWatch", "stuck_watch"]

ANSWERS = 1.0
"""Seconds that the members have to answer."""

LOOKS = 8
"""So many looks in the time after which an operation is stuck; at least one a second."""

MOST = 600.0
"""Seconds between two questions about a receive that waits for members which have nothing to do."""

_TOLD = math.inf
"""There is no next question."""

_UNKNOWN = None, 0.0, 0.0

_log = logger(__name__)


class Watched(Protocol):
    """A generation: `multiworld._generation.generation.Generation`."""

    world: str
    number: int
    rank: int
    operations: GenerationOperations


class _Place:
    """What was noticed of one generation.

    Attributes:
        after: seconds after which an operation is stuck.
        asking: whether its members are being asked.
        known: operations by the id of their entries, each with the time of the next question (`_TOLD`
            where it was told) and the pause before that.
    """

    def __init__(self, after: float) -> None:
        self.after = after
        self.asking = False
        self.known: dict[int, tuple[Entry, float, float]] = {}


class StuckWatch:
    """See the module."""

    def __init__(self) -> None:
        self._registered = False
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._places: dict[Watched, _Place] = {}
        self._thread: threading.Thread | None = None
        self._pid = 0

    def add(self, gen: Watched) -> None:
        """Look after a generation, unless ``M8D_STUCK_AFTER`` is 0."""
        after = settings.load().stuck_after
        if not after:
            return
        with self._lock:
            if not self._registered:
                # Its thread does not live in a forked child, nor are the parent's worlds the child's.
                self._registered = True
                os.register_at_fork(after_in_child=self._forget)
            self._pid = os.getpid()
            self._places[gen] = _Place(after)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="m8d-stuck", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the host has no thread left for this process: with the next world
                    self._thread = None
            self._changed.set()

    def remove(self, gen: Watched) -> None:
        """The generation is over. Any thread."""
        if self._pid == os.getpid():  # else a thread of the parent may have held a lock
            self._places.pop(gen, None)
            if not self._places:
                self._changed.set()

    def first_told(self, gen: Watched, waiting: Iterable[Entry]) -> Entry | None:
        """Return the first of a generation's operations that was told as stuck. Any thread.

        Args:
            gen: the generation.
            waiting: entries of its log that are not over.
        """
        place = self._places.get(gen)
        known = {} if place is None else place.known
        return next((each for each in waiting if known.get(id(each), _UNKNOWN)[1] == _TOLD), None)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._places:
                    self._thread = None
                    return
                places = self._all()
                self._changed.clear()
            pause = self._look_at_all(places)
            del places  # a world that is closed meanwhile goes
            self._changed.wait(pause)

    def _all(self) -> list[tuple[Watched, _Place]]:
        while True:
            # `remove` takes no lock, and the collector may let another thread run meanwhile.
            with contextlib.suppress(RuntimeError):
                return list(self._places.items())

    def _look_at_all(self, places: list[tuple[Watched, _Place]]) -> float:
        """Look at all worlds; returns the seconds until the next time."""
        now = time.monotonic()
        for gen, place in places:
            try:
                self._look(gen, place, now)
            except Exception:  # noqa: BLE001, PERF203  (logged: the other worlds are looked at, and this one again)
                _log.exception(
                    "world %r: operations that wait for long could not be looked for",
                    gen.world,
                    extra=about(gen.world, gen.number, gen.rank),
                )
        # `remove` takes no lock: there may be none.
        return min([1.0, *(place.after / LOOKS for _, place in places)])

    def _look(self, gen: Watched, place: _Place, now: float) -> None:
        if place.asking:
            return
        late = gen.operations.log.waiting(now - place.after)
        place.known = {id(each): place.known[id(each)] for each in late if id(each) in place.known}
        due = [each for each in late if id(each) not in place.known or place.known[id(each)][1] <= now]
        if due:
            place.asking = True
            try:
                ending.run(lambda: self._ask(gen, place, due))
            except RuntimeError:  # no thread: at the next look
                place.asking = False

    def _ask(self, gen: Watched, place: _Place, due: list[Entry]) -> None:
        try:
            reports = gen.operations.reports(ANSWERS, deep=True)
            found = gen.operations.pending_among(reports)
            stacks = {rank: each.stack for rank, each in reports.items() if each is not None and each.stack}
            silent = [rank for rank, each in reports.items() if each is None]
            told: list[PendingOperation] = []
            for entry in due:
                operation = _of(entry, gen.rank, found)
                if operation is None:  # it has ended since
                    continue
                _, _, before = place.known.get(id(entry), (entry, 0.0, place.after))
                if operation.idle:
                    pause = min(2 * before, MOST)
                    place.known[id(entry)] = (entry, time.monotonic() + pause, pause)
                elif gen in self._places:
                    place.known[id(entry)] = (entry, _TOLD, before)
                    if operation in told:  # two receives of the same are one to others
                        continue
                    told.append(operation)
                    for rank in silent:
                        # Once among all that wait, and for all their operations: it takes a process.
                        if (
                            rank in operation.missing
                            and rank not in stacks
                            and gen.rank == min(operation.waiting)
                        ):
                            stacks[rank] = gen.operations.stack_from_outside(rank)
                    _tell(gen, operation, {rank: stack for rank, stack in stacks.items() if stack})
        except Exception:  # noqa: BLE001  (logged: a thread of a pool must not raise)
            _log.exception(
                "world %r: who is missing could not be found out",
                gen.world,
                extra=about(gen.world, gen.number, gen.rank),
            )
        finally:
            place.asking = False


def _of(entry: Entry, rank: int, found: tuple[PendingOperation, ...]) -> PendingOperation | None:
    """Return this member's operation among all; None where it is not pending any more."""
    ranks = entry[GROUP].ranks
    for each in found:
        same = (each.kind, each.number, each.tag) == (entry[KIND], entry[NUMBER], entry[TAG])
        group = each.number is None or each.ranks == ranks
        if rank in each.waiting and same and group and each.peer == entry[PEER]:
            return each
    for each in found:  # the members differ, and others came first
        if (
            each.number is not None
            and (each.number, each.ranks) == (entry[NUMBER], ranks)
            and rank in each.missing
        ):
            return each
    return None


def _tell(gen: Watched, operation: PendingOperation, stacks: dict[int, str]) -> None:
    missing = {rank: stacks[rank] for rank in operation.missing if rank in stacks}
    operation = operation.with_stacks(missing)
    # Once among all that wait: their logs often go to one place.
    first = gen.rank == min(operation.waiting)
    text = "".join(f"\nrank {rank}, {stack}" for rank, stack in missing.items() if first)
    _log.warning(
        "world %r (generation %d), rank %d: %s%s",
        gen.world,
        gen.number,
        gen.rank,
        operation,
        text,
        extra=about(gen.world, gen.number, gen.rank),
    )
    bus.publish(WorldStuck(gen.world, gen.number, gen.rank, time.monotonic(), operation))


stuck_watch = StuckWatch()
"""The process's own."""
