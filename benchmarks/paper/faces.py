"""The three programs: torch's groups, awaited communicators by world name, and `World` of this package.

Only pymultiworld's public API is used, and the same calls on both packages.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


class Groups:
    """torch.distributed: one default group of all processes, and a group beside it for each "world"."""

    def __init__(self, rank: int, count: int, backend: str, device: Any) -> None:
        self._rank, self._count, self._backend, self._device = rank, count, backend, device
        self._groups: dict[str, Any] = {}

    def connect(self, port: int, worlds: Mapping[str, Sequence[int]], ports: Mapping[str, int]) -> None:  # noqa: ARG002  (one signature for all faces)
        """Join the default group, and the others; every process of the default group makes each of them."""
        dist.init_process_group(
            self._backend, init_method=f"tcp://127.0.0.1:{port}", rank=self._rank, world_size=self._count
        )
        for name, members in worlds.items():
            self._groups[name] = dist.new_group([*members])

    def send(self, world: str, peer: int) -> Callable[[torch.Tensor], Any]:
        """A function that sends a tensor to a process, by its rank among all, and returns."""
        group = self._groups[world]
        return lambda tensor: dist.send(tensor, peer, group=group)

    def recv(self, world: str, peer: int) -> Callable[[torch.Tensor], Any]:
        """A function that receives a tensor, blocking."""
        group = self._groups[world]
        return lambda tensor: dist.recv(tensor, peer, group=group)

    def irecv(self, world: str, peer: int) -> Callable[[torch.Tensor], Any]:
        """A function that posts a receive."""
        group = self._groups[world]
        return lambda tensor: dist.irecv(tensor, peer, group=group)


class Named:
    """`WorldManager` and `WorldCommunicator`: pymultiworld's, or this package's of the same names."""

    def __init__(self, rank: int, _count: int, backend: str, device: Any) -> None:
        self._rank, self._backend, self._device = rank, backend, device
        self._members: dict[str, Sequence[int]] = {}
        self.loop = asyncio.new_event_loop()
        self._manager: Any = self.loop.run_until_complete(self._managed())

    def connect(self, port: int, worlds: Mapping[str, Sequence[int]], ports: Mapping[str, int]) -> None:  # noqa: ARG002  (one signature for all faces)
        """Join one's worlds, one after the other."""
        for name, members in worlds.items():
            if self._rank in members:
                self.loop.run_until_complete(self.join(name, members, ports[name]))

    async def join(self, name: str, members: Sequence[int], port: int) -> None:
        """Join a world while other tasks go on."""
        self._members[name] = members
        more = {} if self._device is None else {"device": self._device}
        await self._manager.initialize_world(
            name, members.index(self._rank), len(members), backend=self._backend, addr="127.0.0.1",
            port=port, **more,
        )  # fmt: skip

    def index(self, world: str, peer: int) -> int:
        """The rank in the world of a process, by its rank among all."""
        return self._members[world].index(peer)

    def send(self, world: str, peer: int) -> Callable[[torch.Tensor], Any]:
        """A function that returns an awaitable send."""
        index, send = self.index(world, peer), self._manager.communicator.send
        return lambda tensor: send(tensor, index, world)

    def recv(self, world: str, peer: int) -> Callable[[torch.Tensor], Any]:
        """A function that returns an awaitable receive."""
        index, recv = self.index(world, peer), self._manager.communicator.recv
        return lambda tensor: recv(tensor, index, world)

    async def _managed(self) -> Any:
        return import_module("multiworld.manager").WorldManager(enable_monitor=True)


class Worlds:
    """`World`'s own calls, in the worlds that a `Named` of this package has joined."""

    def __init__(self, named: Named) -> None:
        self._named = named

    def send(self, world: str, peer: int) -> Callable[[torch.Tensor], Any]:
        """A function that sends a tensor and returns."""
        here, index = self._of(world, peer)
        return lambda tensor: here.send(tensor, index)

    def recv(self, world: str, peer: int) -> Callable[[torch.Tensor], Any]:
        """A function that receives a tensor, blocking."""
        here, index = self._of(world, peer)
        return lambda tensor: here.recv(tensor, index)

    def irecv(self, world: str, peer: int) -> Callable[[torch.Tensor], Any]:
        """A function that posts a receive."""
        here, index = self._of(world, peer)
        return lambda tensor: here.irecv(tensor, index)

    def _of(self, world: str, peer: int) -> tuple[Any, int]:
        return import_module("multiworld").worlds()[world], self._named.index(world, peer)
