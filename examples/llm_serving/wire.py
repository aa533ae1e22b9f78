"""Messages between the front and its workers, over worlds, or over plain torch.distributed to compare with.

A call is a header of fixed size, a body of the size that the header says, and an answer of the size that the front
expects. Answers are told apart by tag: each group of sequences has its own, so several calls are under way at once.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist
from model import Batch, Decoder
from torch import Tensor

import multiworld as mw

__all__ = ["Link", "PlainLink", "WorldLink", "serve_plain", "serve_world"]

RUN, PING, END = range(3)
FIELDS = 5  # of a header: kind, stage, rows, width, tag
PATIENCE = 120.0
"""Seconds that a worker waits for a front that is started again."""


class Link(Protocol):
    """A worker, as the front calls it."""

    async def call(self, stage: int, batch: Batch, data: Tensor, tag: int) -> Tensor:
        """Run a stage there; the arguments and the answer are those of `Decoder.run`."""

    async def ping(self) -> int:
        """The worker's pid, once it answers."""


class Shapes:
    """How large an answer is, and how a call lies in bytes."""

    def __init__(self, stages: int, hidden: int, dtype: torch.dtype) -> None:
        self.stages, self.hidden, self.dtype = stages, hidden, dtype

    def answer(self, stage: int, rows: int, width: int) -> Tensor:
        """An empty answer."""
        if stage == self.stages - 1:
            return torch.empty(rows, dtype=torch.int64)
        return torch.empty(rows, width, self.hidden, dtype=self.dtype)

    @staticmethod
    def pack(stage: int, batch: Batch, data: Tensor, tag: int) -> tuple[Tensor, Tensor]:
        """Header and body of a call."""
        header = torch.tensor([RUN, stage, batch.rows, data.shape[1], tag])
        where = torch.stack((batch.slots, batch.starts, batch.counts))
        return header, torch.cat((where.flatten().view(torch.uint8), data.flatten().view(torch.uint8)))

    def body(self, stage: int, rows: int, width: int) -> Tensor:
        """An empty body."""
        item = 8 if stage == 0 else self.hidden * self.dtype.itemsize
        return torch.empty(rows * (3 * 8 + width * item), dtype=torch.uint8)

    def unpack(self, stage: int, rows: int, width: int, body: Tensor) -> tuple[Batch, Tensor]:
        """What `pack` was given."""
        where = body[: rows * 24].view(torch.int64).view(3, rows)
        data = body[rows * 24 :].clone()  # begins at a multiple of its own size
        if stage == 0:
            return Batch(*where), data.view(torch.int64).view(rows, width)
        return Batch(*where), data.view(self.dtype).view(rows, width, self.hidden)


class WorldLink:
    """A worker in a world of its own with the front."""

    def __init__(self, world: mw.World, shapes: Shapes) -> None:
        self.world, self.shapes, self.generation = world, shapes, world.generation

    async def call(self, stage: int, batch: Batch, data: Tensor, tag: int) -> Tensor:
        """As `Link`.

        Raises:
            multiworld.WorldError: the worker is lost, and with it what it kept.
        """
        if self.world.generation != self.generation:
            raise mw.WorldError(self.world.name, f"{self.world.name} has another worker since")
        header, body = self.shapes.pack(stage, batch, data, tag)
        answer = self.shapes.answer(stage, batch.rows, data.shape[1])
        await self.world.aio.send(header, dst=1)
        await self.world.aio.send(body, dst=1, tag=tag)
        await self.world.aio.recv(answer, src=1, tag=tag)
        return answer

    async def ping(self) -> int:
        """As `Link`; an idle worker's receive would end at the world's timeout without it."""
        answer = torch.empty(1, dtype=torch.int64)
        await self.world.aio.send(torch.tensor([PING, 0, 0, 0, 0]), dst=1)
        await self.world.aio.recv(answer, src=1)
        return int(answer[0])


class PlainLink:
    """A worker in the one group of torch.distributed: nothing there can be awaited, so a thread waits."""

    def __init__(self, rank: int, shapes: Shapes, threads: ThreadPoolExecutor) -> None:
        self.rank, self.shapes, self.threads = rank, shapes, threads

    async def call(self, stage: int, batch: Batch, data: Tensor, tag: int) -> Tensor:
        """As `Link`."""
        header, body = self.shapes.pack(stage, batch, data, tag)
        answer = self.shapes.answer(stage, batch.rows, data.shape[1])
        sent = (dist.isend(header, self.rank), dist.isend(body, self.rank, tag=tag))
        await self._over(dist.irecv(answer, self.rank, tag=tag), *sent)
        return answer

    async def ping(self) -> int:
        """As `Link`."""
        header, answer = torch.tensor([PING, 0, 0, 0, 0]), torch.empty(1, dtype=torch.int64)
        sent = dist.isend(header, self.rank)
        await self._over(dist.irecv(answer, self.rank), sent)
        return int(answer[0])

    async def _over(self, *works: dist.Work | None) -> None:
        def wait() -> None:
            for work in works:
                assert work is not None  # noqa: S101  (only outside of a group)
                work.wait()

        await asyncio.get_running_loop().run_in_executor(self.threads, wait)


def serve_world(world: mw.World, decoder: Decoder) -> None:
    """Answer the front's calls until it leaves; wait for it while it is started again."""
    while True:
        try:
            _answer(decoder, world.recv, world.send, peer=0)
        except mw.WorldError:
            if world.breakage is not None and world.breakage.cause is mw.Cause.LEFT:
                return
            world.wait_active(PATIENCE)


def serve_plain(decoder: Decoder) -> None:
    """Answer the front's calls until the launcher ends this process."""
    while True:
        _answer(decoder, dist.recv, dist.send, peer=0)


def _answer(decoder, recv, send, peer: int) -> None:  # noqa: ANN001  (of torch.distributed, or of a world)
    """Take one call, and answer it."""
    header = torch.empty(FIELDS, dtype=torch.int64)
    recv(header, peer)
    kind, stage, rows, width, tag = header.tolist()
    if kind == PING:
        send(torch.tensor([os.getpid()]), peer)
        return
    shapes = Shapes(decoder.stages, decoder.hidden, decoder.settings.torch_dtype())
    body = shapes.body(stage, rows, width)
    recv(body, peer, tag=tag)
    batch, data = shapes.unpack(stage, rows, width, body)
    send(decoder.run(stage, batch, data).contiguous(), peer, tag=tag)
