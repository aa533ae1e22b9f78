"""Tells when the calls that were blocked in a broken world have raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld.events import WorldUnblocked, bus

if TYPE_CHECKING:
    from multiworld._core.membership.roster import Roster
    from multiworld._core.operations.log import OperationLog
    from multiworld.events import Breakage

__all__ = ["LOOKS", "PAUSE", "Unblocked"]

PAUSE = 1.0
"""Seconds between two looks."""

LOOKS = 10
"""How often it is looked; a call that is blocked for longer is never told of."""


class Unblocked:
    """A step for `multiworld._generation.background_release`.

    Args:
        log: of the generation that broke, frozen.
        roster: of that generation.
        breakage: why it broke.
    """

    def __init__(self, log: OperationLog, roster: Roster, breakage: Breakage) -> None:
        self._log = log
        self._roster = roster
        self._breakage = breakage
        self._looks = 0

    def __call__(self) -> float | None:
        """Publish `WorldUnblocked`, or return the seconds until the next look."""
        at = self._log.unblocked()
        if at is None:
            self._looks += 1
            return PAUSE if self._looks < LOOKS else None
        roster, seconds = self._roster, max(0.0, at - self._breakage.at)
        bus.publish(
            WorldUnblocked(roster.world, roster.generation, roster.rank, at, self._log.blocked, seconds)
        )
        return None
