"""pymultiworld's communicator: awaitable collectives by world name, on the worlds of this process."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from multiworld.errors import BrokenWorldException, UnknownWorldError, WorldClosedError
from multiworld.events import State

if TYPE_CHECKING:
    from torch import Tensor

    from multiworld.operation_table import ReduceOperation
    from multiworld.world import World

__all__ = ["BrokenWorldException", "WorldCommunicator"]

DEFAULT_WORLD_NAME = ""
"""Means the only world there is."""

REMEMBERED = 1000
"""Names of removed worlds that are known as such: programs may use ever new ones."""


class _NeverHereError(BrokenWorldException, UnknownWorldError):
    """No world of that name here. pymultiworld says of such a world, too, that it is broken."""


class WorldCommunicator:
    """Collectives by world name, as pymultiworld 0.2.x has them.

    Each operation raises `BrokenWorldException` for a world that is broken, was removed or is closed, and
    `UnknownWorldError` for a name that never was a world here (pymultiworld's programs may catch it as
    `BrokenWorldException`, too, which it raises there).

    Args:
        world_manager: its `multiworld.manager.WorldManager`; kept for programs that pass it.
    """

    def __init__(self, world_manager: object = None) -> None:
        self._world_manager = world_manager
        self._worlds: dict[str, World | None] = {}  # None: not initialized yet
        self._removed: deque[str] = deque(maxlen=REMEMBERED)

    # -- which worlds ----------------------------------------------------------------------------------------

    def add_world(self, world_name: str, backend: str = "gloo") -> None:  # noqa: ARG002  (pymultiworld's)
        """Make the name known; `WorldManager` calls it, programs need not."""
        self._worlds[world_name] = None

    def set_world(self, world_name: str, world: World) -> None:
        """Say which world the name means now; `WorldManager` calls it."""
        self._worlds[world_name] = world

    def remove_world(self, world_name: str) -> None:
        """Forget the world; operations under its name raise BrokenWorldException from now on."""
        if world_name in self._worlds:
            if world_name not in self._removed:
                self._removed.append(world_name)
            self._worlds.pop(world_name, None)  # another thread may have

    def is_broken(self, world_name: str) -> bool:
        """Whether the world is not active: broken, removed, not initialized yet, or never known."""
        try:
            return self._find(world_name).state is not State.ACTIVE
        except BrokenWorldException:
            return True

    # -- operations ------------------------------------------------------------------------------------------

    async def send(self, tensor: Tensor, dst: int, world_name: str = DEFAULT_WORLD_NAME) -> None:
        """Send `tensor` to rank `dst` of the world."""
        await self._do(world_name, "send", tensor, dst)

    async def recv(self, tensor: Tensor, src: int, world_name: str = DEFAULT_WORLD_NAME) -> None:
        """Receive into `tensor` from rank `src` of the world."""
        await self._do(world_name, "recv", tensor, src)

    async def broadcast(self, tensor: Tensor, src: int, world_name: str = DEFAULT_WORLD_NAME) -> None:
        """Give every member `src`'s `tensor`."""
        await self._do(world_name, "broadcast", tensor, src)

    async def all_reduce(
        self, tensor: Tensor, op: ReduceOperation | None = None, world_name: str = DEFAULT_WORLD_NAME
    ) -> None:
        """Reduce everyone's `tensor` in place, in everyone; `op` is a ``dist.ReduceOp``, SUM by default."""
        await self._do(world_name, "all_reduce", tensor, op)

    async def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOperation | None = None,
        world_name: str = DEFAULT_WORLD_NAME,
    ) -> None:
        """Reduce everyone's `tensor` into `dst`'s."""
        await self._do(world_name, "reduce", tensor, dst, op)

    async def all_gather(
        self, tensors: list[Tensor], tensor: Tensor, world_name: str = DEFAULT_WORLD_NAME
    ) -> None:
        """Collect everyone's `tensor` in everyone's `tensors`."""
        await self._do(world_name, "all_gather", tensors, tensor)

    async def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        world_name: str = DEFAULT_WORLD_NAME,
    ) -> None:
        """Collect everyone's `tensor` in `dst`'s `gather_list`."""
        await self._do(world_name, "gather", tensor, gather_list, dst)

    async def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        world_name: str = DEFAULT_WORLD_NAME,
    ) -> None:
        """Give each rank its tensor of `src`'s `scatter_list`."""
        await self._do(world_name, "scatter", tensor, scatter_list, src)

    async def _do(self, world_name: str, op: str, *args: object) -> None:
        try:
            await getattr(self._find(world_name).aio, op)(*args)
        except WorldClosedError as exc:
            # pymultiworld knows one way for a world to be over, and programs catch that.
            raise BrokenWorldException(world_name, str(exc), cause="left") from exc

    def _find(self, world_name: str) -> World:
        world = self._worlds.get(world_name)
        if world is not None:
            return world
        if world_name in self._worlds or world_name in self._removed:
            raise BrokenWorldException(
                world_name, "the world was removed, or is not initialized", cause="left"
            )
        here = {name: each for name, each in self._worlds.copy().items() if each is not None}
        if world_name == DEFAULT_WORLD_NAME and len(here) == 1:
            return next(iter(here.values()))
        raise _NeverHereError(
            world_name,
            f"no world {world_name!r} in this process. Worlds here: {', '.join(sorted(here)) or 'none'}. "
            "Initialize it first: await manager.initialize_world(...)",
        )
