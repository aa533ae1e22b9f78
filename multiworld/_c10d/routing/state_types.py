"""Types of what a `WorldState` holds for others, as the state itself and the router need them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from torch import Tensor

__all__ = ["GlooGroups", "ParkedReceives"]

W = TypeVar("W")


class GlooGroups(Protocol):
    """A `multiworld._c10d.gloo.backend.GlooWorld`."""

    def posted(self, work: W) -> W:
        """Note that a send or a receive was posted in this thread; returns it."""


class ParkedReceives(Protocol):
    """A `multiworld._generation.parked_receives.ParkedReceives`."""

    @property
    def waiting(self) -> Sized:
        """Those that can be claimed."""

    def claim(self, src: int | None, tag: int, tensor: Tensor, post: Callable[[Tensor], Any]) -> object:
        """Return the work of a receive that comes after parked ones; None if it comes after none."""
