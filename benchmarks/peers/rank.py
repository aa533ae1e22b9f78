"""A member of a world of pymultiworld, or of this package's interface of the same names.

Only pymultiworld's public API is used, and nothing of this package that pymultiworld has not, but for "aio"
and "world". "plain" is torch's own group, called directly.
"""

from __future__ import annotations

import asyncio
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.measuring.stock import Stock, plain_calls
from benchmarks.measuring.timing import settle, told, undisturbed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_clock = time.perf_counter_ns


def make(rank: int, count: int, args: dict[str, Any]) -> Member:
    """See `benchmarks.measuring.ranks`; `args` has "backend"."""
    torch.set_num_threads(1)
    return Member(rank, count, args["backend"])


class Member(Stock):
    """One rank of every world that is made, and of a plain group where it is wanted."""

    def __init__(self, rank: int, count: int, backend: str) -> None:
        super().__init__(rank, count)
        self._backend = backend
        self._loop = asyncio.new_event_loop()
        self._manager: Any = self._loop.run_until_complete(self._managed())
        settle()

    def who(self) -> dict[str, str]:
        """Which package and which torch this is."""
        return {"package": str(import_module("multiworld").__file__), "torch": torch.__version__}

    def meet(self, port: int) -> None:
        """Join torch's default group, over the store that rank 0 serves at that port."""
        self._join_stock(port)

    def create(self, world: str, port: int) -> float:
        """Make a world, its store at that port; milliseconds until it is there."""
        began = _clock()
        self._loop.run_until_complete(
            self._manager.initialize_world(
                world, self._rank, self._count, backend=self._backend, addr="127.0.0.1", port=port
            )
        )
        return (_clock() - began) / 1e6

    def round_trips(self, world: str, face: str, size: int, repeat: int, warm_up: int) -> dict[str, float]:
        """Messages to and fro: one way, in microseconds; see `told`."""
        send, recv, more = self._face(world, face)
        tensor = torch.empty(size // 4).fill_(float(self._rank))

        async def run(times: int) -> list[int]:
            taken = [0] * times
            for i in range(times):
                began = _clock()
                if self._rank == 0:
                    await send(tensor, 1, *more)
                    await recv(tensor, 1, *more)
                else:
                    await recv(tensor, 0, *more)
                    await send(tensor, 0, *more)
                taken[i] = _clock() - began
            return taken

        self._loop.run_until_complete(run(warm_up))
        with undisturbed():
            taken = self._loop.run_until_complete(run(repeat))
        if not bool((tensor == 0).all()):
            raise AssertionError(f"{face}: rank 0 sent zeros, and {tensor[:4].tolist()}... came back")
        return told(taken, 0.5)

    def stream(self, world: str, face: str, size: int, messages: int) -> float:
        """Messages from rank 0 to rank 1, after a first one; GB/s (10^9)."""
        send, recv, more = self._face(world, face)
        tensor = torch.empty(size // 4).fill_(float(self._rank))

        async def run(times: int) -> None:
            for _ in range(times):
                if self._rank == 0:
                    await send(tensor, 1, *more)
                else:
                    await recv(tensor, 0, *more)

        self._loop.run_until_complete(run(1))
        with undisturbed():
            began = _clock()
            self._loop.run_until_complete(run(messages))
            taken = _clock() - began
        if not bool((tensor == 0).all()):
            raise AssertionError(f"{face}: rank 0 sent zeros, and {tensor[:4].tolist()}... came")
        return size * messages / taken

    async def _managed(self) -> Any:
        return import_module("multiworld.manager").WorldManager(enable_monitor=True)

    def _face(
        self, world: str, face: str
    ) -> tuple[Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]], tuple[str, ...]]:
        if face == "communicator":
            communicator = self._manager.communicator
            return communicator.send, communicator.recv, (world,)
        if face == "plain":
            blocking_send, blocking_recv = plain_calls(dist.group.WORLD)
        else:
            here = import_module("multiworld").worlds()[world]
            if face == "aio":
                return here.aio.send, here.aio.recv, ()
            blocking_send, blocking_recv = here.send, here.recv

        async def send(tensor: torch.Tensor, rank: int) -> None:
            blocking_send(tensor, rank)

        async def recv(tensor: torch.Tensor, rank: int) -> None:
            blocking_recv(tensor, rank)

        return send, recv, ()
