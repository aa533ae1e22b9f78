"""A member in `fanin`: rank 0 receives from all; each of the others shares one world with it."""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import multiworld as mw
from benchmarks.measuring.stock import Stock
from benchmarks.measuring.timing import settle, undisturbed
from multiworld._c10d.routing import router
from multiworld.communicator import WorldCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 120.0
"""Seconds for a join: the leader makes its worlds in turn, and the last worker waits for all of them."""
_LOOK = 0.0005
"""Seconds between two looks at the flag."""
LAST = -1.0
"""What a worker's last message holds."""

_clock = time.perf_counter


def make(rank: int, count: int, args: dict[str, Any]) -> Member:
    """See `benchmarks.measuring.ranks`; `args` has "flag", a file of one byte that all of them share."""
    torch.set_num_threads(1)
    return Member(rank, count, args["flag"])


class Member(Stock):
    """The leader (rank 0), or a worker: rank r of stock's group, and rank 1 of the world "w<r>"."""

    def __init__(self, rank: int, count: int, flag: str) -> None:
        super().__init__(rank, count)
        self._worlds: list[mw.World] = []
        self._communicator = WorldCommunicator()
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(count)
        descriptor = os.open(Path(flag), os.O_RDWR)
        self._flag = mmap.mmap(descriptor, 1)
        os.close(descriptor)

    def meet(self, port: int) -> None:
        """Join stock's group, and the worlds."""
        self._join_stock(port)
        for worker in [self._rank] if self._rank else range(1, self._count):
            name = f"w{worker}"
            world = mw.join(name, min(self._rank, 1), 2, store=self._store, timeout=PATIENCE)
            self._worlds.append(world)
            self._communicator.set_world(name, world)
        settle()

    def leave(self) -> None:
        """Close everything."""
        router.install()
        for world in self._worlds:
            world.close()
        dist.destroy_process_group()
        self._threads.shutdown()
        self._loop.close()
        self._flag.close()

    # -- workers ---------------------------------------------------------------------------------------------

    def feed(self, form: str, size: int, messages: int) -> None:
        """Send one message to the leader, and when it has raised the flag as many as that."""
        send, tensor = self._sender(form, size)
        with undisturbed():
            send(tensor, 0)
            self._wait_for_flag()
            for _ in range(messages):
                send(tensor, 0)

    def feed_on(self, form: str, size: int) -> None:
        """Send to the leader until it has raised the flag, and a last message that says so."""
        send, tensor = self._sender(form, size)
        while not self._flag[0]:
            send(tensor, 0)
        tensor.fill_(LAST)
        send(tensor, 0)

    def _wait_for_flag(self) -> None:
        """Sends that return before they are received would run ahead of the leader's clock otherwise."""
        deadline = _clock() + PATIENCE
        while not self._flag[0]:
            if _clock() > deadline:
                raise TimeoutError(f"the leader has not begun within {PATIENCE:g} s")
            time.sleep(_LOOK)

    def _sender(self, form: str, size: int) -> tuple[Callable[..., Any], torch.Tensor]:
        _route(form)
        send = dist.send if form.startswith("stock") else self._worlds[0].send
        return send, torch.empty(size // 4).fill_(float(self._rank))

    # -- the leader ------------------------------------------------------------------------------------------

    def drain(self, form: str, workers: int, size: int, messages: int) -> float:
        """Receive as many messages from each of the first workers; seconds, from when all were let go."""
        tensors = self._begin(form, workers, size)
        left = [messages] * workers

        def go_on(worker: int) -> bool:
            left[worker] -= 1
            return left[worker] > 0

        with undisturbed():
            began = _clock()
            self._flag[0] = 1
            self._receive(form, tensors, go_on)
            seconds = _clock() - began
        for number, tensor in enumerate(tensors, 1):
            if not bool((tensor == number).all()):
                raise AssertionError(f"{form}: {tensor[:4].tolist()}... came from rank {number}")
        return seconds

    def drain_for(self, form: str, workers: int, size: int, seconds: float) -> list[int]:
        """Receive whatever comes for so long; how many messages came from each worker meanwhile."""
        self._flag[0] = 0
        tensors = self._begin(form, workers, size)
        counts = [0] * workers
        end = math.inf

        def go_on(worker: int) -> bool:
            nonlocal end
            end = min(end, _clock() + seconds)  # from the first message on
            if _clock() < end:
                counts[worker] += 1
            elif not self._flag[0]:
                self._flag[0] = 1
            return float(tensors[worker][0]) != LAST

        self._receive(form, tensors, go_on)
        return counts

    def lower_flag(self) -> None:
        """Before workers start to send when it is raised, or until it is."""
        self._flag[0] = 0

    def _begin(self, form: str, workers: int, size: int) -> list[torch.Tensor]:
        """Tensors to receive in, one message in each: every worker is there and sends."""
        _route(form)
        tensors = [torch.empty(size // 4).fill_(0.0) for _ in range(workers)]
        for number, tensor in enumerate(tensors, 1):
            if form.startswith("stock"):
                dist.recv(tensor, number)
            else:
                self._worlds[number - 1].recv(tensor, 1)
        return tensors

    def _receive(self, form: str, tensors: list[torch.Tensor], go_on: Callable[[int], bool]) -> None:
        """Receive from every worker until `go_on(worker)`, asked after each message, says no."""
        worlds = self._worlds
        match form:
            case "stock_irecv":
                self._in_turn(lambda worker: dist.irecv(tensors[worker], worker + 1), len(tensors), go_on)
            case "irecv":
                self._in_turn(lambda worker: worlds[worker].irecv(tensors[worker], 1), len(tensors), go_on)
            case "stock_threads":
                self._in_threads(lambda worker: dist.recv(tensors[worker], worker + 1), len(tensors), go_on)
            case "threads":
                self._in_threads(lambda worker: worlds[worker].recv(tensors[worker], 1), len(tensors), go_on)
            case "aio":
                self._in_tasks(
                    lambda worker: worlds[worker].aio.recv(tensors[worker], 1), len(tensors), go_on
                )
            case "communicator":
                recv = self._communicator.recv
                self._in_tasks(lambda worker: recv(tensors[worker], 1, f"w{worker + 1}"), len(tensors), go_on)
            case _:
                raise ValueError(f"{form!r} is no form of a fan-in")

    @staticmethod
    def _in_turn(irecv: Callable[[int], Any], workers: int, go_on: Callable[[int], bool]) -> None:
        """One receive posted for each at all times, and waited for one after the other."""
        works = {worker: irecv(worker) for worker in range(workers)}
        while works:
            for worker, work in list(works.items()):
                work.wait()
                if go_on(worker):
                    works[worker] = irecv(worker)
                else:
                    del works[worker]

    def _in_threads(self, recv: Callable[[int], Any], workers: int, go_on: Callable[[int], bool]) -> None:
        """A thread for each."""
        together = threading.Barrier(workers)

        def receive(worker: int) -> None:
            together.wait(PATIENCE)
            recv(worker)
            while go_on(worker):
                recv(worker)

        for running in [self._threads.submit(receive, worker) for worker in range(workers)]:
            running.result(PATIENCE)

    def _in_tasks(self, recv: Callable[[int], Any], workers: int, go_on: Callable[[int], bool]) -> None:
        """A task for each, on one event loop."""

        async def receive(worker: int) -> None:
            await recv(worker)
            while go_on(worker):
                await recv(worker)

        async def receive_all() -> None:
            await asyncio.gather(*(receive(worker) for worker in range(workers)))

        self._loop.run_until_complete(receive_all())


def _route(form: str) -> None:
    """Stock is stock: in its rounds multiworld's routing is taken out of torch."""
    if form.startswith("stock"):
        router.uninstall()
    else:
        router.install()
