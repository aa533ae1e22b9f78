"""One question to the other members of a world, and what they have answered until now."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from multiworld._core.operations.report import MAX_REPORT

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Inquiry"]


class Inquiry:
    """See the module. The watchdog's thread calls `heard` and `give_up`, the asker waits.

    Args:
        ranks: of the members that are asked.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._pieces = {rank: bytearray() for rank in ranks}
        self._answers: dict[int, bytes] = {}
        self._over = threading.Event()
        self._look()

    def heard(self, rank: int, piece: bytes, *, last: bool) -> None:
        """Take a piece of a member's answer; one that is longer than a report may be is dropped."""
        pieces = self._pieces.get(rank)
        if pieces is None or rank in self._answers:
            return
        if len(pieces) + len(piece) <= MAX_REPORT:
            pieces += piece
        if last:
            self._answers[rank] = bytes(pieces)
            self._look()

    def lost(self, ranks: Iterable[int]) -> None:
        """These members do not answer any more."""
        for rank in ranks:
            self._pieces.pop(rank, None)
        self._look()

    def _look(self) -> None:
        if self._pieces.keys() <= self._answers.keys():
            self._over.set()

    def give_up(self) -> None:
        """No more answers come: the world is over."""
        self._over.set()

    def wait(self, seconds: float) -> dict[int, bytes]:
        """Wait until all have answered, at most so long; return the answers by rank."""
        self._over.wait(max(0.0, seconds))
        return dict(self._answers)
