"""A process of the paper's programs: commands of receivers and of senders.

It runs with pymultiworld as well as with this package, or with torch alone: nothing of either is imported
before it is asked for.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.measuring.timing import settle, undisturbed
from benchmarks.paper.faces import Groups, Named, Worlds
from benchmarks.paper.layout import PLAIN, SAME, THEIRS, WORLD

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

PATIENCE = 120.0
"""Seconds that a process waits for the others of a round."""
FLAGS = 16
"""Bytes that all processes of a program share: one for each receiver, the last says that it is over."""
OVER = FLAGS - 1
LAST = -1.0
"""What a sender's last message holds."""
_LOOK = 0.0005
_clock = time.monotonic


class Member:
    """A receiver or a sender, of one form."""

    def __init__(self, rank: int, count: int, args: Mapping[str, Any]) -> None:
        self._rank, self._form = rank, args["form"]
        self._device = None
        if args.get("cuda"):
            # The leader has the first GPU and each sender the next one; other receivers need none.
            place = max(0, rank - count // 2 + 1)
            self._device = torch.device("cuda", place % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        base: Any = Groups if self._form == PLAIN else Named
        self._base: Any = base(rank, count, args["backend"], self._device)
        self._loop: Any = getattr(self._base, "loop", None)
        self._native = None if self._form == PLAIN else Worlds(self._base)
        descriptor = os.open(Path(args["flags"]), os.O_RDWR)
        self._flags = mmap.mmap(descriptor, FLAGS)
        os.close(descriptor)
        settle()

    def who(self) -> dict[str, str]:
        """Which package and which torch this is."""
        package = "" if self._form == PLAIN else str(import_module("multiworld").__file__)
        return {"package": package, "torch": torch.__version__}

    def connect(self, port: int, worlds: dict[str, list[int]], ports: dict[str, int]) -> float:
        """Join the worlds; milliseconds."""
        began = _clock()
        self._base.connect(port, worlds, ports)
        settle()
        return 1e3 * (_clock() - began)

    def lower(self) -> None:
        """Before a round."""
        self._flags[:] = bytes(FLAGS)

    # -- senders ---------------------------------------------------------------------------------------------

    def feed(self, form: str, world: str, peer: int, size: int, messages: int, receivers: int) -> None:
        """Send one message, and when all receivers have theirs as many as that."""
        tensor = self._tensor(size).fill_(float(self._rank))
        send = self._calls(form).send(world, peer)

        def go() -> None:
            deadline = _clock() + PATIENCE
            while self._flags[:receivers] != b"\1" * receivers:
                if _clock() > deadline:
                    raise TimeoutError(f"not all {receivers} receivers have begun within {PATIENCE:g} s")
                time.sleep(_LOOK)

        if self._awaits(form):

            async def run() -> None:
                await send(tensor)
                go()
                for _ in range(messages):
                    await send(tensor)

            with undisturbed():
                self._loop.run_until_complete(run())
            return
        with undisturbed():
            send(tensor)
            self._done()
            go()
            for _ in range(messages):
                send(tensor)
            self._done()

    # -- receivers -------------------------------------------------------------------------------------------

    def drain(self, form: str, links: list[list[Any]], size: int, messages: int) -> list[float]:
        """Receive as many messages from each after the first one; when it began and ended (monotonic)."""
        tensors = [self._tensor(size) for _ in links]
        calls = self._calls(form)
        recvs = [calls.recv(world, peer) for world, peer in links]
        if self._awaits(form):
            began, ended = self._loop.run_until_complete(self._awaited(recvs, tensors, messages))
        else:
            for recv, tensor in zip(recvs, tensors, strict=True):
                recv(tensor)
            self._done()
            posts = [calls.irecv(world, peer) for world, peer in links]
            with undisturbed():
                began = self._let_go()
                self._in_turn(posts, tensors, messages)
                self._done()
                ended = _clock()
        for (_, peer), tensor in zip(links, tensors, strict=True):
            if not bool((tensor.cpu() == peer).all()):  # a fake GPU copies, and compares nothing
                raise AssertionError(f"{form}: {tensor[:4].tolist()}... came from rank {peer}")
        return [began, ended]

    def _let_go(self) -> float:
        began = _clock()
        self._flags[self._rank] = 1
        return began

    async def _awaited(
        self, recvs: Sequence[Callable[[Any], Awaitable[Any]]], tensors: Sequence[Any], messages: int
    ) -> tuple[float, float]:
        async def receive(number: int) -> None:
            for _ in range(messages):
                await recvs[number](tensors[number])

        for recv, tensor in zip(recvs, tensors, strict=True):
            await recv(tensor)
        with undisturbed():
            began = self._let_go()
            await asyncio.gather(*(receive(number) for number in range(len(recvs))))
            return began, _clock()

    @staticmethod
    def _in_turn(posts: Sequence[Callable[[Any], Any]], tensors: Sequence[Any], messages: int) -> None:
        """One receive posted for each at all times, and waited for one after the other."""
        works = [post(tensor) for post, tensor in zip(posts, tensors, strict=True)]
        for left in reversed(range(messages)):
            for number, (post, tensor) in enumerate(zip(posts, tensors, strict=True)):
                works[number].wait()
                if left:
                    works[number] = post(tensor)

    # -- both ------------------------------------------------------------------------------------------------

    def _calls(self, form: str) -> Any:
        return self._native if form == WORLD else self._base

    def _awaits(self, form: str) -> bool:
        return form in (THEIRS, SAME)

    def _tensor(self, size: int) -> torch.Tensor:
        return torch.zeros(size // 4, device=self._device)

    def _done(self) -> None:
        """On a GPU an operation that has returned was only queued."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
