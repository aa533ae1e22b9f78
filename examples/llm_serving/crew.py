"""Workers that are there, and those of them that stand by."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field

from wire import Link

__all__ = ["Crew", "Worker"]


@dataclass(eq=False)
class Worker:
    """A worker that is there, from its start to its death: the one started in its place is another."""

    index: int
    pid: int
    link: Link
    dead: bool = False
    calls: list[object] = field(
        default_factory=list
    )  # who waits for an answer, the one that it works on first


class Crew:
    """Workers that stand by."""

    def __init__(self) -> None:
        self.standbys: deque[Worker] = deque()
        self.urgent = 0  # pipelines that wait for a stage
        self.changed = asyncio.Condition()

    async def add(self, worker: Worker) -> None:
        """A worker is there, or is needed no longer."""
        async with self.changed:
            if not worker.dead:
                self.standbys.append(worker)
                self.changed.notify_all()

    def lost(self, worker: Worker) -> None:
        """A worker is dead; if it is a stage, its next call says so."""
        worker.dead = True
        with contextlib.suppress(ValueError):
            self.standbys.remove(worker)

    async def replacement(self) -> Worker:
        """A worker for a stage that lost its own; waits for one if need be."""
        async with self.changed:
            self.urgent += 1
            try:
                await self.changed.wait_for(lambda: self.standbys)
                return self.standbys.popleft()
            finally:
                self.urgent -= 1
                self.changed.notify_all()

    async def take(self, count: int) -> list[Worker]:
        """Workers for a new pipeline, all at once, and not before running ones have what they need."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.standbys) >= count and not self.urgent)
            return [self.standbys.popleft() for _ in range(count)]
