"""Agreeing on a table after a rendezvous: everyone lays down a card, the first decides, everyone reads."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld.run.errors import RunError
from multiworld.run.nodes import slots as seats
from multiworld.run.nodes.rendezvous_store import Board, SilentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.run.nodes.slots import Card, Table

__all__ = ["Meeting", "newest_table"]

_log = logging.getLogger(__name__)

GATHERING = 15.0
"""Seconds for which the first waits for the others' cards: one that died since the rendezvous has none."""

_PAUSE = 0.03  # seconds between two looks
_PAUSE_SILENT = 0.5  # the same where the last one was in vain


@dataclass(frozen=True)
class Meeting:
    """One meeting.

    Attributes:
        board: of the round.
        rank, size: of this node and the round.
        card: of this node.
        after: epoch that this node knows; the table has to be a later one.
        counts: see `seats.meet`.
        token: for a run that has no table yet.
    """

    board: Board
    rank: int
    size: int
    card: Card
    after: int
    counts: tuple[int, ...] | None
    token: str

    def table(self, deadline: float, cancelled: Callable[[], bool]) -> tuple[int, Table]:
        """Return the agreed table and its number on the board.

        Args:
            deadline: ``time.monotonic()`` seconds.
            cancelled: asked between two looks.

        Raises:
            RunError: there was none in time.
        """
        last = "nobody has decided"
        laid = decided = applied = False
        while not cancelled():
            try:
                if not laid:
                    self.board.write(f"card/{self.rank}", seats.to_json(self.card))
                    laid = True
                if self.rank == 0 and not decided:
                    self._decide(min(deadline - 1.0, time.monotonic() + GATHERING), cancelled)
                    decided = True
                found = newest_table(self.board, -1)
                if found is not None:
                    if found[1].epoch > self.after and found[1].node(self.card.node.id) is not None:
                        return found
                    last = "the other nodes have not let this one in yet"
                    if not applied:
                        number = self.board.count("applies")
                        self.board.write(f"apply/{number}", seats.to_json(self.card))
                        applied = True
            except SilentError as error:
                last = f"the rendezvous store does not answer: {error}"
                if error.gone:
                    break
                time.sleep(_PAUSE_SILENT)
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE)
        raise RunError(
            f"the nodes did not agree on who sits where: {last}",
            rule="All nodes of a rendezvous agree within a minute",
            next_step="See whether the other nodes run m8d-run with the same --rdzv-id and --worlds, and look at their logs",
        )

    def _decide(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Gather the cards, as long as it takes and the deadline allows, and write the first table."""
        if self.board.read("table/0") is not None:
            return  # a store that outlives its rounds, as a static one does
        cards: dict[int, Card] = {}
        while True:
            for rank in range(self.size):
                data = None if rank in cards else self.board.read(f"card/{rank}")
                if data is not None:
                    cards[rank] = seats.card_from(data)
            if len(cards) == self.size or time.monotonic() >= deadline or cancelled():
                break
            time.sleep(_PAUSE)
        if len(cards) < self.size:
            _log.warning(
                "%d of %d nodes of the rendezvous did not say who they are", self.size - len(cards), self.size
            )
        table = seats.meet([cards[rank] for rank in sorted(cards)], counts=self.counts, token=self.token)
        self.board.add("table", 0, seats.to_json(table))


def newest_table(board: Board, after: int) -> tuple[int, Table] | None:
    """Return the newest table with a number above `after`.

    Raises:
        SilentError: the store does not answer, or what it says is no table.
    """
    found = board.newest("table", after)
    if found is None:
        return None
    try:
        return found[0], seats.table_from(found[1])
    except (KeyError, TypeError, ValueError) as error:
        raise SilentError(f"table/{found[0]} in the rendezvous store is no table: {error!r}") from error
