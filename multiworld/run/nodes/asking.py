"""Asks the other launchers what they know, without waiting for their answers."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from multiworld._net.blocking import BlockingCall
from multiworld.run.nodes import votes
from multiworld.run.nodes.beginnings import SAID

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from multiworld.run.nodes.slots import Membership

__all__ = ["Asking"]

_ANSWER = 0.5  # seconds that the others have to answer
_EVERY = 1.0  # seconds between an answer and the next question


class Asking:
    """See the module; used by one thread.

    Args:
        told: returns the snapshots of the other launchers, of those that answer within so many seconds.
        every: seconds between an answer and the next question.

    Attributes:
        again: when it asks again, in ``time.monotonic()`` seconds; 0.0 before the first answers.
    """

    def __init__(self, told: Callable[[float], list[dict[str, Any]]], every: float = _EVERY) -> None:
        self._told, self._every = told, every
        self._asked: BlockingCall[list[dict[str, Any]]] | None = None
        self.again = 0.0

    def agreed(self, membership: Membership, me: str, lost: Collection[str], now: float) -> set[str]:
        """Return those of the lost nodes that a majority has lost; none while the answers are not there."""
        said = self.said(now) if lost else None
        return set() if said is None else votes.agreed(membership, me, lost, said)

    def said(self, now: float) -> list[dict[str, Any]] | None:
        """Return what each of the others says, once for each question; None while the answers are not there.

        An answer may be one that was given to an earlier question (`told_snapshot.ToldSnapshot`).
        """
        if self._asked is None and now >= self.again:
            with contextlib.suppress(RuntimeError):  # no thread is left: it is asked at the next turn
                self._asked = BlockingCall(partial(self._told, _ANSWER), name="m8d-nodes-asks")
        if self._asked is None or not self._asked.wait(0.0):
            return None
        asked, self._asked, self.again = self._asked, None, now + self._every
        return [found for each in asked.result() if isinstance(found := each.get(SAID), dict)]
