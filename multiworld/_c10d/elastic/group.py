"""One process group object over all generations of a world: `World.elastic_group`."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch

from multiworld._c10d.plain_methods import PLAIN
from multiworld._c10d.routing.selection import current
from multiworld._c10d.routing.state import StandIn
from multiworld.errors import MultiworldError, WorldClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._c10d.routing.state import WorldState

__all__ = ["ElasticGeneration", "ElasticGroup", "group_of_block"]

_ProcessGroup: Any = torch._C._distributed_c10d.ProcessGroup

# What C++ calls on a group that it is given (DDP's reducer, `_broadcast_coalesced`). In a world these may
# return works that are Python objects, and C++ does not keep such a work alive (torch 2.4 to 2.6).
_called_by_cxx = frozenset({"allreduce", "broadcast", "allgather"})


class ElasticGeneration(Protocol):
    """What the group needs of a generation of its world.

    Attributes:
        rank, size, number, world: of this process in it; its number, and the world's name.
        c10d: what the router selects for it.
    """

    rank: int
    size: int
    number: int
    world: str
    c10d: WorldState

    @property
    def pg(self) -> Any:
        """Its process group, made if it is not yet; raises once the generation is over."""

    def make(self) -> None:
        """Make `pg` if it is not yet; raises as that does."""


class ElasticGroup(StandIn, _ProcessGroup):  # type: ignore[misc, unused-ignore]
    """A ``torch.distributed.ProcessGroup`` that always means the world's present generation.

    Rank and size are those of the generation, also after its end; all else is asked of its process group, and
    raises the world's error once it is over. In a block of an older generation it means that one.

    Args:
        generation: returns the world's present generation.
    """

    def __init__(self, generation: Callable[[], ElasticGeneration]) -> None:
        first = generation()
        _ProcessGroup.__init__(self, first.rank, first.size)
        self.generation = generation

    def state(self) -> WorldState:
        """Return what the router selects for the present generation, whose group is looked up there."""
        present = self.generation()
        with contextlib.suppress(MultiworldError):  # it is over, and answers all the same
            present.make()
        return present.c10d

    def rank(self) -> int:
        """This process's rank in the present generation."""
        return self.generation().rank

    def size(self) -> int:
        """How many members the present generation has."""
        return self.generation().size

    # C++ asks under its own names.
    getRank, getSize = rank, size  # noqa: N815  (the names under which C++ asks)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """As of the present process group."""
        return str(self._asked("name")())

    def __repr__(self) -> str:
        present = self.generation()
        return f"<ElasticGroup of {present.world!r}, generation {present.number}, {present.size} members>"

    def _asked(self, name: str) -> Any:
        """Return an attribute of the process group that is meant here and now."""
        present = self.generation()
        group, of_block = present.pg, group_of_block(present)
        if of_block is not None:
            group = of_block
        if name in _called_by_cxx and present.c10d.traffic is None:
            function = PLAIN[name]
            getattr(group, name)  # raises, if it is over
            return lambda *args, **kwargs: _posted(present.c10d, function, group, args, kwargs)
        return getattr(group, name)


def _posted(state: WorldState, function: Any, group: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    if state.taken:
        state.hold(group, function.__name__, args, kwargs)
    return function(group, *args, **kwargs)


def group_of_block(present: ElasticGeneration) -> Any:
    """Return the process group of another generation of the world, in whose block this is; None elsewhere.

    Raises:
        Exception: the world's, of that generation, if it is broken.
        WorldClosedError: it was closed.
    """
    selected = current()
    if selected is None or selected is present.c10d or selected.name != present.world:
        return None
    group = selected.default_pg
    if group is None:
        raise WorldClosedError(
            present.world,
            f"world {present.world!r}: this block's generation, {selected.generation}, was closed",
            rule="A block belongs to the generation in which it was entered",
            next_step="Enter it anew: `with world:`",
        )
    return group


def _forwarded(name: str) -> Any:
    def call(self: ElasticGroup, *args: Any, **kwargs: Any) -> Any:
        return self._asked(name)(*args, **kwargs)

    call.__name__ = name
    return call


def _forwarded_property(name: str) -> property:
    return property(lambda self: self._asked(name))


for _name, _member in vars(_ProcessGroup).items():
    # Whatever a version of torch has there; not what belongs to Python or pybind, and not nested types.
    if _name in vars(ElasticGroup) or _name.endswith("_"):
        continue
    if isinstance(_member, property):
        setattr(ElasticGroup, _name, _forwarded_property(_name))
    elif callable(_member) and not inspect.isclass(_member) and not isinstance(_member, staticmethod):
        setattr(ElasticGroup, _name, _forwarded(_name))
