"""One process of the pipeline: what every stage does, and how it lives through the death of a neighbour."""

from __future__ import annotations

import asyncio

import torch

import multiworld as mw

__all__ = ["PATIENCE", "ROOM", "WIDTH", "Stage", "back", "finish"]

WIDTH = 64  # numbers in a request, after its own number
ROOM = 4  # requests that a process holds at most; also what dies with it
PATIENCE = 60.0  # seconds for a dead neighbour to be back


class Stage:
    """One process of the pipeline: takes requests from its inputs, works, hands them to any output that is free."""

    def __init__(self, worlds: dict[str, mw.World]) -> None:
        self.inputs = [world for world in worlds.values() if world.rank == 1]
        self.outputs = [world for world in worlds.values() if world.rank == 0]
        self.room = asyncio.Semaphore(ROOM)
        self.ready: asyncio.Queue[torch.Tensor] = asyncio.Queue()

    async def receive(self, world: mw.World) -> None:
        """Take requests from one neighbour until it leaves; wait for it while it is dead."""
        while True:
            await self.room.acquire()
            request = torch.empty(1 + WIDTH, dtype=torch.float64)
            try:
                await world.aio.recv(request, src=0)
            except mw.WorldError:
                self.room.release()
                if not await back(world):
                    return
            else:
                await self.arrived(request)

    async def arrived(self, request: torch.Tensor) -> None:
        """The work of a stage; the front has another use for what arrives."""
        request[1:] += 1
        await self.ready.put(request)

    async def send(self, world: mw.World) -> None:
        """Hand requests to one neighbour as fast as it takes them; another one gets what it did not."""
        while True:
            request = await self.ready.get()
            try:
                await world.aio.send(request, dst=1)
            except mw.WorldError:
                await self.ready.put(request)
                if not await back(world):
                    return
            except asyncio.CancelledError:
                await self.ready.put(request)
                raise
            else:
                self.sent()

    def sent(self) -> None:
        """A neighbour has it: there is room for another one."""
        self.room.release()

    async def run(self) -> None:
        """Work until every input has left."""
        senders = [asyncio.create_task(self.send(world)) for world in self.outputs]
        await asyncio.gather(*(self.receive(world) for world in self.inputs))
        await finish(senders)


async def back(world: mw.World) -> bool:
    """Wait until a broken world is whole again; False where its other member left, or stays away."""
    breakage = world.breakage
    if world.state is mw.State.CLOSED or (breakage is not None and breakage.cause is mw.Cause.LEFT):
        return False
    try:
        await asyncio.to_thread(world.wait_active, PATIENCE)
    except mw.WorldError:
        return False
    return True


async def finish(senders: list[asyncio.Task[None]]) -> None:
    """End the senders; what they were sending is theirs to the end."""
    for task in senders:
        task.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
