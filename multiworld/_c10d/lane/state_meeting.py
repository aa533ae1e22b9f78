"""Barrier of all members of a generation before and after a state is sent, or at the end of their functions.

It has an order of its own: another thread of the program may call the world's collectives meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._c10d.lane.collective_dispatch import WITHOUT_LIMITS, GroupCollectives
from multiworld._c10d.lane.collectives import wait_explained
from multiworld._c10d.lane.p2p_dispatch import number_of
from multiworld._core.operations.log import OperationLog

if TYPE_CHECKING:
    from multiworld._c10d.lane.messages import Messages

__all__ = ["StateMeeting"]


class StateMeeting:
    """See the module.

    Args:
        messages: of the generation.
        rank: of this process.
        size: of the generation, 2 or more.
        what: they wait for; each has an order of its own.
    """

    def __init__(self, messages: Messages, rank: int, size: int, what: str = "state") -> None:
        self._messages, self._name = messages, f"wait for a {what}"
        self._group = GroupCollectives(
            messages.endpoint,
            number_of(f"m8d:{what}-meeting"),
            range(size),
            rank,
            messages.timeout,
            carried=True,
            near=True,
            alone=True,
            # Not the world's: that counts operations, and tells of those that wait for long, as this one may.
            log=OperationLog(rank, size),
            limits=WITHOUT_LIMITS,
        )

    def wait(self, seconds: float) -> None:
        """Wait until all members are here.

        Args:
            seconds: at most.

        Raises:
            Exception: the world's error.
        """
        wait_explained(self._group.wait_for_all(self._name), self._messages, seconds)
