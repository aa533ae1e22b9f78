"""Pipelines of stages that outlive their workers, and the sequences that run through them in batches.

A pipeline holds a worker for each stage. Where one is lost, a standby takes its place, and each group of sequences
writes its keys and values there anew, from what went into that stage before, which is kept here. The other stages
still have theirs. No client is told; the next token comes a little later.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from crew import Crew, Worker
from model import Batch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import multiworld as mw

__all__ = ["Pipeline", "Scheduler", "Sequence"]

WORKERS = 3
"""So many workers in a row a batch may cost; then it is taken for the cause."""


class Fatal(Exception):
    """A batch that ends each worker that runs it."""


@dataclass(eq=False)
class Sequence:
    """A request: the tokens so far, and where they go."""

    tokens: list[int]
    limit: int  # length at which it ends
    stop: int | None  # token that ends it
    fresh: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)  # None: the end
    cached: int = 0  # tokens whose keys and values the stages have
    inputs: list[list[Tensor]] = field(default_factory=list)  # of each stage, step by step, [tokens, ...]
    slot: int = -1
    over: bool = False
    error: str = ""  # why there is no whole answer

    def add(self, token: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self.fresh.put_nowait(token)
        if token == self.stop or len(self.tokens) >= self.limit:
            self.end()

    def end(self) -> None:
        """It is complete, or its client is gone; its group frees the slot."""
        if not self.over:
            self.over = True
            self.fresh.put_nowait(None)


class Pipeline:
    """Stages, and groups of sequences that run through them: as many groups as stages, so that all have work."""

    _numbers = itertools.count()

    def __init__(self, workers: list[Worker], scheduler: Scheduler) -> None:
        self.number = next(self._numbers)
        self.stages, self.scheduler = workers, scheduler
        self.locks = [asyncio.Lock() for _ in workers]
        rows = scheduler.slots // len(workers)
        self.groups = [Group(self, number, rows) for number in range(len(workers))]
        self.retiring = False
        self.running = [asyncio.create_task(group.run()) for group in self.groups]
        for task in self.running:
            task.add_done_callback(scheduler.ended)

    async def through(self, group: Group, stage: int, batch: Batch, data: Tensor) -> Tensor:
        """Run one stage, on another worker if its own is lost.

        Raises:
            Fatal: `WORKERS` of them were lost at this batch.
        """
        lost = 0
        while lost < WORKERS:
            worker = self.stages[stage]
            if not worker.dead:
                worker.calls.append(group)
                try:
                    if group.holders[stage] is not worker:
                        await self.replay(group, stage, worker)
                    answer = await worker.link.call(stage, batch, data, 1 + group.number)
                except mw.WorldError:
                    # Calls stay in the list of a lost worker: those behind the first are not the cause.
                    lost += worker.calls[0] is group
                else:
                    worker.calls.remove(group)
                    return answer
            await self.replace(stage, worker)
        raise Fatal(f"{lost} workers in a row were lost while they ran this request's batch")

    async def replay(self, group: Group, stage: int, worker: Worker) -> None:
        """Write the group's keys and values on a worker that is new in this stage."""
        begun = [sequence for sequence in group.sequences if sequence.cached]
        if begun:
            counts = [sequence.cached for sequence in begun]
            data = pad_sequence([torch.cat(each.inputs[stage]) for each in begun], batch_first=True)
            batch = Batch.of([each.slot for each in begun], [0] * len(begun), counts)
            await worker.link.call(stage, batch, data, 1 + group.number)
            self.scheduler.counts["replayed"] += len(begun)
        group.holders[stage] = worker

    async def replace(self, stage: int, lost: Worker) -> None:
        """Let a standby be this stage; of several groups that ask, the first does it."""
        async with self.locks[stage]:
            if self.stages[stage] is lost:
                self.stages[stage] = await self.scheduler.crew.replacement()
                self.scheduler.counts["takeovers"] += 1

    async def retire(self) -> None:
        """Take no new sequences, hand on those that are here, and let the workers stand by."""
        self.retiring = True
        for group in self.groups:
            group.wake.set()
        await asyncio.gather(*self.running)
        for worker in self.stages:
            await self.scheduler.crew.add(worker)


class Group:
    """Sequences that are a batch together."""

    def __init__(self, pipeline: Pipeline, number: int, rows: int) -> None:
        self.pipeline, self.number = pipeline, number
        self.free = [number * rows + row for row in range(rows)]
        self.sequences: list[Sequence] = []
        self.holders: list[Worker | None] = [None] * len(pipeline.stages)
        self.wake = asyncio.Event()

    def add(self, sequence: Sequence) -> None:
        """Take a sequence; it is in the next step. One from elsewhere comes with its tokens, and no more."""
        sequence.slot, sequence.cached = self.free.pop(), 0
        sequence.inputs = [[] for _ in self.pipeline.stages]
        self.sequences.append(sequence)
        self.wake.set()

    def remove(self, sequence: Sequence) -> None:
        """Free its slot."""
        self.sequences.remove(sequence)
        self.free.append(sequence.slot)

    async def run(self) -> None:
        """Step after step: new sequences first, to the length of their prompt, else a token for all."""
        scheduler = self.pipeline.scheduler
        while True:
            for sequence in [each for each in self.sequences if each.over]:
                self.remove(sequence)
            if self.pipeline.retiring:
                for sequence in [*self.sequences]:
                    if (other := scheduler.room()) is not None:
                        self.remove(sequence)
                        other.add(sequence)
            scheduler.place()
            if not self.sequences:
                if self.pipeline.retiring:
                    return
                self.wake.clear()
                await self.wake.wait()
                continue
            new = [sequence for sequence in self.sequences if not sequence.cached]
            batch = new or [*self.sequences]
            try:
                await self.step(batch)
            except Fatal as error:
                for sequence in batch:
                    sequence.error = str(error)
                    sequence.end()

    async def step(self, sequences: list[Sequence]) -> None:
        """Give each sequence its next token."""
        spans = [(sequence.cached, len(sequence.tokens)) for sequence in sequences]
        counts = [end - start for start, end in spans]
        batch = Batch.of([sequence.slot for sequence in sequences], [start for start, _ in spans], counts)
        fresh = [torch.tensor(each.tokens[each.cached :]) for each in sequences]
        data, inputs = pad_sequence(fresh, batch_first=True), []
        for stage in range(len(self.pipeline.stages)):
            inputs.append(data)
            data = await self.pipeline.through(self, stage, batch, data)
        for row, (sequence, token) in enumerate(zip(sequences, data.tolist(), strict=True)):
            for kept, passed in zip(sequence.inputs, inputs, strict=True):
                kept.append(passed[row, : counts[row]])
            sequence.cached = spans[row][1]
            if not sequence.over:
                sequence.add(token)
                self.pipeline.scheduler.counts["tokens"] += 1


class Scheduler:
    """Requests that wait, and the pipelines that take them; `fault` gets the error of a group that failed."""

    def __init__(self, crew: Crew, stages: int, slots: int) -> None:
        self.crew, self.stages, self.slots = crew, stages, slots
        self.waiting: deque[Sequence] = deque()
        self.pipelines: list[Pipeline] = []
        self.counts = {"tokens": 0, "takeovers": 0, "replayed": 0}
        self.resizing = asyncio.Lock()
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(self, task: asyncio.Task[None]) -> None:
        """A group is done; an error that it does not know is one of this program."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.fault.done():
            self.fault.set_exception(error)

    def submit(self, sequence: Sequence) -> None:
        """Take a request."""
        self.waiting.append(sequence)
        self.place()

    def room(self) -> Group | None:
        """The group with the fewest sequences, if any has a slot."""
        groups = [
            group for each in self.pipelines if not each.retiring for group in each.groups if group.free
        ]
        return min(groups, key=lambda group: len(group.sequences), default=None)

    def place(self) -> None:
        """Give waiting requests to groups with room."""
        while self.waiting:
            if self.waiting[0].over:
                self.waiting.popleft()
            elif (group := self.room()) is not None:
                group.add(self.waiting.popleft())
            else:
                return

    async def resize(self, count: int, patience: float | None = None) -> None:
        """Add pipelines, or retire the newest.

        Raises:
            asyncio.TimeoutError: too few workers stood by for `patience` seconds; nothing has changed.
        """
        async with self.resizing:
            if (missing := count - len(self.pipelines)) > 0:
                # Those of all new pipelines at once: too few are left where they are.
                workers = await asyncio.wait_for(self.crew.take(self.stages * missing), patience)
                while workers:
                    self.pipelines.append(Pipeline(workers[: self.stages], self))
                    del workers[: self.stages]
                self.place()
            while len(self.pipelines) > count:
                await self.pipelines[-1].retire()
                self.pipelines.pop()

    def status(self) -> dict[str, Any]:
        """Who does what."""

        def tell(workers: Iterable[Worker]) -> list[dict[str, int]]:
            return [{"worker": worker.index, "pid": worker.pid} for worker in workers]

        pipelines = [
            {"number": each.number, "retiring": each.retiring, "stages": tell(each.stages),
             "sequences": sum(len(group.sequences) for group in each.groups)}
            for each in self.pipelines
        ]  # fmt: skip
        others = {"standbys": tell(self.crew.standbys), "waiting": len(self.waiting)}
        return {"pipelines": pipelines, **others, **self.counts}
