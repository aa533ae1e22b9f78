"""The last operations of one member of a world: a ring that every operation of the world writes to.

To write costs an operation some 0.2 µs, so an entry is a list whose fields have numbers:

    entry = [group, kind, None, size, peer, tag, time.monotonic(), None]
    log.append(entry)
    ...
    entry[ENDED] = time.monotonic()

The last field is None while a thread is inside of the operation, and then the time of its end. That of an
operation that was posted is a function that returns it (`Posted`), or None where it is gone: a weak
reference.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from multiworld._core.operations.report import MemberReport, Operation, whole
from multiworld._core.operations.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BEGAN", "ENDED", "GROUP", "KIND", "LENGTH", "NUMBER", "PEER", "SIZE", "TAG", "Entry", "LoggedGroup",
    "OperationLog", "Posted", "went_well",
]  # fmt: skip

LENGTH = 64
"""Operations that a log keeps."""

GROUP, KIND, NUMBER, SIZE, PEER, TAG, BEGAN, ENDED = range(8)

Entry = list[Any]
"""See the module. `number` is None for messages, `peer` None where there is none, or any, `tag` None for
collectives."""


class Posted(Protocol):
    """An operation that was posted: a message or collective of the lane, or a call of torch's."""

    @property
    def done(self) -> bool:
        """Whether it is over, or no thread waits for it and it is not known."""

    @property
    def has_caller(self) -> bool:
        """Whether a thread or a task waits for it and writes the time of its end; False if not known."""


class LoggedGroup:
    """A process group of the world, in its log.

    Args:
        number: the same on all members; 0 for the world's default group.
        ranks: of its members, as ranks of the world.
        totals: of the world.

    Attributes:
        number, ranks, totals: as given.
        begun: number of its last collective; 0 before the first.
        count: gives the next number.
    """

    __slots__ = ("begun", "count", "number", "ranks", "totals")

    def __init__(self, number: int, ranks: tuple[int, ...], totals: Totals) -> None:
        self.number = number
        self.ranks = ranks
        self.totals = totals
        self.begun = 0
        self.count = itertools.count(1)

    def following(self) -> int:
        """Return the number of the collective that begins now."""
        self.begun = found = next(self.count)
        return found

    def take_back(self, number: int) -> None:
        """The collective of this number came to nothing: the next one gets it, as on the other members."""
        if self.begun == number:
            self.begun = number - 1
            self.count = itertools.count(number)


class OperationLog:
    """See the module.

    Args:
        rank: of this member.
        size: of the world.

    Attributes:
        rank: as given.
        entries: the last ones, in the order in which they began.
        append: takes an entry.
        world: the world's default group.
        totals: of all operations that are over.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.totals = Totals(size)
        self.entries: deque[Entry] = deque(maxlen=LENGTH)
        self.append = self.entries.append
        self.world = LoggedGroup(0, tuple(range(size)), self.totals)
        self._groups = {0: self.world}
        self._frozen: tuple[float, list[tuple[Any, ...]]] | None = None
        self._blocked: list[Entry] = []

    def known(self, number: int) -> LoggedGroup:
        """Return the group with this number; the world's where it is not known."""
        return self._groups.get(number, self.world)

    def drop(self, number: int) -> None:
        """Forget a group that this process has destroyed."""
        self._groups.pop(number, None)

    def group(self, number: int, ranks: tuple[int, ...]) -> LoggedGroup:
        """Return the group with this number and these members, the same object each time."""
        found = self._groups.get(number)
        if found is not None:
            return found
        # Another thread may have been first, and its count holds.
        return self._groups.setdefault(number, LoggedGroup(number, ranks, self.totals))

    def waiting(self, before: float) -> list[Entry]:
        """Return all operations that are not over and began before a time, the oldest first."""
        # Looked at once a second in every world: most are over.
        return [
            each
            for each in self._all()
            if type(each[ENDED]) is not float and each[BEGAN] <= before and _end(each) is None
        ]

    def report(self, now: float, stack: str = "") -> MemberReport:
        """Return what this member has done and is doing.

        Args:
            now: of the clock whose times the entries have.
            stack: of its Python threads.
        """
        # Neither a tuple nor pairs: these take memory in the middle, where the collector may run, and what it
        # destroys may drop a group.
        begun = {group.number: group.begun for group in list(self._groups.values()) if group.begun}
        frozen = self._frozen
        entries = [tuple(each) for each in self._all()] if frozen is None else frozen[1]
        at = now if frozen is None else frozen[0]
        return MemberReport(self.rank, begun, tuple(_operation(each, at) for each in entries), stack)

    def freeze(self, now: float) -> None:
        """The world is over: what is pending now ends by that, and reports go on to tell of this moment."""
        if self._frozen is None:
            self._blocked = [each for each in self._all() if _holds_a_caller(each)]
            self._frozen = now, [(*each[:ENDED], _end(each)) for each in self._all()]
            self.totals.close()

    @property
    def blocked(self) -> int:
        """How many calls a thread or a task was in when the log was frozen."""
        return len(self._blocked)

    def unblocked(self) -> float | None:
        """Return when the last of those calls was over; None where one is not, or where no end was seen."""
        ends = [_end(each) for each in self._blocked]
        seen = [each for each in ends if type(each) is float]
        return max(seen) if seen and None not in ends else None

    def _all(self) -> list[Entry]:
        while True:
            # Where memory is taken in between, the collector may run, and then another thread, which appends.
            with contextlib.suppress(RuntimeError):
                return list(self.entries)


def went_well(entry: Entry) -> None:
    """Count an operation that is over without an error, once. Messages of the lane do it themselves."""
    totals: Totals = entry[GROUP].totals
    if entry[TAG] is None:
        totals.collective(entry[KIND], entry[SIZE])
    else:
        totals.message(entry[KIND], entry[PEER], entry[SIZE])


def _holds_a_caller(entry: Entry) -> bool:
    """Whether a thread or a task is in an operation."""
    ended = entry[ENDED]
    if ended is None or ended is True or type(ended) is float:
        return ended is None
    operation: Posted | None = ended()
    return operation is not None and operation.has_caller


def _end(entry: Sequence[Any]) -> float | bool | None:
    """Return when an operation ended; None if it has not, True if that was not seen."""
    ended = entry[ENDED]
    if ended is None or ended is True or type(ended) is float:
        return ended
    operation: Posted | None = ended()
    return None if operation is not None and not operation.done else True


def _operation(entry: Sequence[Any], now: float) -> Operation:
    group: LoggedGroup = entry[GROUP]
    ended = _end(entry)
    return Operation(
        group.number,
        group.ranks,
        entry[KIND],
        entry[NUMBER],
        int(entry[SIZE]),
        whole(entry[PEER]),
        whole(entry[TAG]),
        max(0.0, now - entry[BEGAN]),
        max(0.0, now - ended) if type(ended) is float else None,
        ended is None,
    )
