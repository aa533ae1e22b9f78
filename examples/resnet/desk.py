"""The leader's desk: which images wait, which are in whose hands, which are done, and how fast it went."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Desk", "Phase"]


@dataclass
class Phase:
    """A time with the same number of workers."""

    name: str
    workers: int
    began: float
    ended: float = 0.0
    images: int = 0

    def __str__(self) -> str:
        seconds = max(1e-9, self.ended - self.began)
        rate = self.images / seconds
        return f"{self.name:9} {self.workers} workers {rate:7.1f} images/s ({self.images} images in {seconds:.1f} s)"


@dataclass
class Desk:
    """Gives out batches of image numbers 0, 1, 2, ... until it is closed; what comes back undone goes out first."""

    batch: int
    workers: int
    done: Counter[int] = field(default_factory=Counter)
    samples: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    rerouted: int = 0
    present: set[str] = field(default_factory=set)
    phases: list[Phase] = field(default_factory=list)
    _next: int = 0
    _back: deque[list[int]] = field(default_factory=deque)
    _out: int = 0
    _complete: int = 0
    _closed: bool = False
    _change: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def take(self) -> list[int]:
        """The next batch; waits, for ever if need be, when all are given out and the desk is closed."""
        async with self._change:
            await self._change.wait_for(lambda: self._back or not self._closed)
            self._out += 1
            if self._back:
                return self._back.popleft()
            self._next += self.batch
            return list(range(self._next - self.batch, self._next))

    async def give_back(self, numbers: list[int]) -> None:
        """A batch whose worker was lost: another gets it."""
        async with self._change:
            self._back.append(numbers)
            self._out -= 1
            self.rerouted += len(numbers)
            self._change.notify_all()

    async def finish(self, numbers: list[int], scores: Tensor) -> None:
        """A batch that came back with its scores; every tenth is kept, to be checked."""
        async with self._change:
            self.done.update(numbers)
            self._out -= 1
            if numbers[0] // self.batch % 10 == 0:
                self.samples[tuple(numbers)] = scores.cpu()
            self.phases[-1].images += len(numbers)
            self._change.notify_all()

    async def worker(self, name: str, *, present: bool) -> None:
        """A worker came or was lost: another phase begins."""
        async with self._change:
            (self.present.add if present else self.present.discard)(name)
            all_here = len(self.present) == self.workers
            if not self._complete and not all_here:
                title = "starting"
            else:
                title = "during" if not all_here else "after" if self._complete else "before"
            self._complete += all_here
            self._cut()
            self.phases.append(Phase(title, len(self.present), time.monotonic()))
            self._change.notify_all()

    async def wait_complete(self, times: int) -> None:
        """Wait until all workers were here together for the `times`-th time."""
        async with self._change:
            await self._change.wait_for(lambda: self._complete >= times)

    async def wait_images(self, more: int) -> None:
        """Wait until `more` images than now are done."""
        async with self._change:
            want = len(self.done) + more
            await self._change.wait_for(lambda: len(self.done) >= want)

    async def close(self) -> None:
        """Give out nothing new, and wait until everything given out is done."""
        async with self._change:
            self._closed = True
            await self._change.wait_for(lambda: not self._out and not self._back)
            self._cut()

    def missing(self) -> list[int]:
        """Images given out that are not done exactly once."""
        return [number for number in range(self._next) if self.done[number] != 1]

    def _cut(self) -> None:
        if self.phases:
            self.phases[-1].ended = time.monotonic()
