"""Succession of generations: what a member reads and writes in its world's record for the next one.

`multiworld._core.membership.assigned` decides. Every call is one or two round trips, bounded in time: the
store may be silent, and the generation does not need it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from multiworld._core.membership import assigned
from multiworld._core.membership.admission import Move
from multiworld._net.patience import NoAnswerError, in_time
from multiworld._net.stores.record import WorldRecord
from multiworld.errors import StoreUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._core.membership.ledger import Ledger
    from multiworld._core.membership.request import JoinRequest
    from multiworld._net.stores.record import StoreLike

__all__ = ["ANSWER_WITHIN", "Departing", "Succession"]

ANSWER_WITHIN = 2.0
"""Seconds in which the store has to answer each call."""

T = TypeVar("T")


class Departing:
    """How far a member that leaves at an advance has come.

    Attributes:
        asked: number of the attempt in which its limit is to be said; 0: none.
        entry: the advance at which it leaves; 0: not decided.
        leaves: whether it leaves at all; not where all members want to, and none would stay.
    """

    def __init__(self, asked: int = 0, entry: int = 0, *, leaves: bool = True) -> None:
        self.asked = asked
        self.entry = entry
        self.leaves = leaves


class Succession:
    """One generation's, for one of its members.

    Args:
        store: see `StoreLike`.
        request: what that member would claim with, as one whose generation still works.
        sleep: waits that many seconds.
    """

    def __init__(
        self, store: StoreLike, request: JoinRequest, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._record = WorldRecord(store, request.world, sleep, request.run)
        self._request = request

    def due(self) -> bool:
        """Whether the generation is to be succeeded; tells a store that was started anew of the world.

        Raises:
            StoreUnreachableError: the store fails or does not answer; as all methods here.
        """

        def look() -> bool:
            self._record.read()
            if self._record.ledger.last < self._request.past_generation:
                self._apply(lambda ledger: assigned.remembered(ledger, self._request))
            return assigned.due(self._record.ledger, self._request.past_generation)

        return self._in_time(look)

    def leave(self) -> None:
        """Say that this member wants to leave at an advance."""
        self._in_time(lambda: self._apply(self._left))

    def departing(self) -> Departing:
        """Read how far this member's departure has come."""

        def look() -> Departing:
            self._record.read()
            ledger, request = self._record.ledger, self._request
            now = ledger.current
            if now is None or now.after != request.past_generation:
                return Departing(leaves=assigned.leaves(ledger, request.past_generation, request.past_rank))
            return Departing(0 if now.unready else now.number, now.entry)

        return self._in_time(look)

    def limit(self, advance: int) -> None:
        """Say which advance this member does not pass."""
        request = self._request
        self._in_time(
            lambda: self._apply(
                lambda ledger: assigned.limit(ledger, request.past_generation, request.past_rank, advance)
            )
        )

    def enter(self) -> bool:
        """Say that this member is not in the generation any more; returns True."""
        request = self._request
        self._in_time(
            lambda: self._apply(
                lambda ledger: assigned.enter(ledger, request.past_generation, request.past_rank)
            )
        )
        return True

    def all_entered(self) -> bool:
        """Read whether no member is in the generation any more."""

        def look() -> bool:
            self._record.read()
            return assigned.all_entered(self._record.ledger, self._request.past_generation)

        return self._in_time(look)

    def _left(self, ledger: Ledger) -> Ledger:
        known = assigned.remembered(ledger, self._request)
        return assigned.leave(known, self._request.past_generation, self._request.past_rank)

    def _apply(self, step: Callable[[Ledger], Ledger]) -> None:
        self._record.apply(lambda ledger: Move(step(ledger)))

    def _in_time(self, function: Callable[[], T]) -> T:
        try:
            return in_time(
                function,
                deadline=time.monotonic() + ANSWER_WITHIN,
                clock=time.monotonic,
                hurry=lambda: False,
                give_up=lambda: None,
                parting=0.0,
                last_words=0.0,
            )
        except NoAnswerError as error:
            raise StoreUnreachableError(
                self._request.world,
                f"The store of world {self._request.world!r} gave {error}",
                rule="It has to answer where a world is to change its members",
                next_step="Check that the process that serves it runs",
            ) from error
