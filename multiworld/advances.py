"""Interface of `multiworld._join.advancing`, for a world's advances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from multiworld._generation.generation import Generation

__all__ = ["Advances"]


class Advances(Protocol):
    """What a world's advances need: `multiworld._join.advancing.Advancing`."""

    @property
    def count(self) -> int:
        """How many advances the world has made."""

    def begin(self, count: int) -> None:
        """Begin with a generation that was joined."""

    def broke(self, gen: Generation) -> None:
        """The generation `gen` broke; quick."""

    def advance(self) -> bool:
        """See `World.advance`."""

    def counted(self) -> bool:
        """Count an advance; return whether `enter` is to be called."""

    def enter(self) -> bool:
        """Enter the next generation if it is due at this advance; may wait."""

    def leave(self) -> None:
        """See `World.leave`."""

    def stop(self, deadline: float) -> None:
        """Wait until nothing is prepared any more."""

    def forked(self) -> None:
        """In a forked child: it is the parent's."""
