"""Types of what a `WorldState` holds for others, as the state itself and the router need them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._C._distributed_c10d import ProcessGroup, Work

__all__ = ["GlooGroups", "LaneChannels", "LaneCollectives", "LogsCalls", "MakesGroup", "Translates"]

W = TypeVar("W")


class GlooGroups(Protocol):
    """A `multiworld._c10d.gloo.backend.GlooWorld`."""

    secure: bool
    timeout: float

    def posted(self, work: W) -> W:
        """Note that a send or a receive was posted in this thread; returns it."""


class LaneChannels(Protocol):
    """A `multiworld._c10d.lane.p2p_dispatch.Channels`."""

    def posted(
        self,
        name: str,
        group: ProcessGroup,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        function: Callable[..., Work],
    ) -> Work | None:
        """Post a send or a receive over the lane, and return its work; None where it is torch's to post."""

    def ended(self, name: str) -> None:
        """Forget what no receive has taken of a group, which this process has destroyed."""


class LaneCollectives(Protocol):
    """A `multiworld._c10d.lane.collectives.GenerationCollectives`."""

    def posted(
        self, name: str, group: ProcessGroup, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Work | None:
        """Begin a collective over the lane, and return its work; None where it is torch's."""


class LogsCalls(Protocol):
    """A `multiworld._c10d.logged_calls.LoggedCalls`."""

    def run(
        self,
        name: str,
        group: ProcessGroup,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        function: Callable[..., Work | None],
    ) -> Work | None:
        """Call a method of a ProcessGroup that torch carries, and return its work."""


class MakesGroup(Protocol):
    """A `multiworld._c10d.late_group.LateGroup`."""

    def makes_here(self) -> bool:
        """Whether it is this thread that makes the group now."""

    def made(self) -> ProcessGroup | None:
        """Make the group if it is not made yet, and return it; None where the world is over."""


class Translates(Protocol):
    """A `multiworld._generation.generation.Generation.translate`."""

    def __call__(self, state: object, error: BaseException, /, *, sure: bool = True) -> BaseException | None:
        """Return what to raise instead of an error of a world; None where it stays.

        With `sure` false, it may be another's error: it breaks nothing.
        """
