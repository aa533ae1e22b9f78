"""One look at all workers of a launcher: who has said how its worlds stand, and who is waited for. Pure."""

from __future__ import annotations

__all__ = ["Look"]


class Look:
    """See the module.

    Args:
        asked: ranks of the workers that were asked.
        deadline: ``time.monotonic()`` seconds; those that have not answered by then are silent.

    Attributes:
        deadline: as given.
    """

    def __init__(self, asked: frozenset[int], deadline: float) -> None:
        self.deadline = deadline
        self._open = set(asked)

    def answered(self, rank: int) -> bool:
        """Note an answer; return whether it was waited for."""
        if rank not in self._open:
            return False
        self._open.remove(rank)
        return True

    @property
    def complete(self) -> bool:
        """Whether all have answered."""
        return not self._open

    @property
    def silent(self) -> list[int]:
        """Ranks of those that have not, ascending."""
        return sorted(self._open)
