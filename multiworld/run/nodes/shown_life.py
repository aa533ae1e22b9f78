"""Shows that the other nodes are watched, and that the loss of a seat does not wait for the agent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld.run.nodes.interface import LifeSigns

__all__ = ["ShownLife"]

_LATE = 0.5  # seconds in which the agent ends the workers of a lost seat, unless it is at something long


class ShownLife:
    """See the module. Only once a seat is lost does the agent's thread matter.

    Before, it may start hundreds of workers, which takes its time.

    Args:
        signs: gets the signs of life; None where they are not asked for.
    """

    def __init__(self, signs: LifeSigns | None) -> None:
        self._signs = signs
        self._seatless_at = float("inf")  # since when the agent is to know it
        self._polled_at = 0.0

    def polled(self) -> None:
        """The agent's thread looks for events."""
        self._polled_at = time.monotonic()

    def seat_lost(self) -> None:
        """The agent is told that this node has no seat any more."""
        self._seatless_at = time.monotonic()

    def show(self) -> None:
        """The thread that watches the other nodes goes on."""
        if self._signs is None:
            return
        if self._polled_at < self._seatless_at < time.monotonic() - _LATE:
            self._seatless_at = float("inf")
            self._signs.seatless()
        self._signs.alive()

    def free(self) -> None:
        """There will be no more signs, and the workers may go on."""
        if self._signs is not None:
            self._signs.free()
