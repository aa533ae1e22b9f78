"""Other nodes whose workers were all retired, as they say themselves: a run may be over with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld.run.nodes.asking import Asking

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from multiworld.run.nodes.slots import Membership
    from multiworld.run.nodes.standing import Standing

__all__ = ["IDLE", "IdleNodes"]

IDLE = "idle"
"""Key of what a launcher says to others: whether all workers of its seat were retired."""

_EVERY = 2.0  # seconds: a run whose other nodes work may go on for hours


class IdleNodes:
    """See the module; used by one thread.

    It asks where no link tells: on a node that is idle itself, and only when the run is over if all nodes are
    idle whose workers have not ended with 0.

    Args:
        told: see `Asking`.
    """

    def __init__(self, told: Callable[[float], list[dict[str, Any]]]) -> None:
        self._asking = Asking(told, _EVERY)
        self._said = self._found = set[str]()

    def others(
        self, standing: Standing, membership: Membership, lost: Collection[str], now: float
    ) -> set[str]:
        """Return the ids of those that have said so twice: an answer may be older than its question.

        Args:
            standing: of this node.
            membership: the present one.
            lost: ids of its nodes that this one has lost.
            now: ``time.monotonic()`` seconds.
        """
        every = {node.id for node in membership.nodes}
        ends = standing.idle and standing.over(membership, lost, every) is not None
        if not ends or standing.over(membership, lost) is not None:
            self._said = self._found = set()
        elif (said := self._asking.said(now)) is not None:
            idle = {str(each.get("node")) for each in said if each.get(IDLE) is True}
            self._said, self._found = idle, idle & self._said
        return self._found
