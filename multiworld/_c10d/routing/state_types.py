"""Types of what a `WorldState` holds for others, as the state itself and the router need them."""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["GlooGroups"]

W = TypeVar("W")


class GlooGroups(Protocol):
    """A `multiworld._c10d.gloo.backend.GlooWorld`."""

    def posted(self, work: W) -> W:
        """Note that a send or a receive was posted in this thread; returns it."""
