"""Trainer 0: the learner that the engines talk to, each in a world of its own."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque

import torch
from torch import Tensor

import multiworld as mw
from _common import PATIENCE, leave, say
from rl.learning import BATCH, Learner

__all__ = ["GO_ON", "STOP", "Leader", "word"]

# What the second trainer is told before each step, and an engine before each rollout.
GO_ON, STOP = 1, 0


def word(value: int, device: torch.device) -> Tensor:
    """A number as a tensor."""
    return torch.tensor([value], device=device)


class Leader:
    """Trainer 0: the learner, and the one that the engines talk to."""

    def __init__(self, args: argparse.Namespace, world: mw.World, engines: int) -> None:
        self.engines = engines
        self.args, self.learner = args, Learner(world)
        self.fresh: deque[Tensor] = deque(maxlen=8)
        self.present: set[str] = set()
        self.complete = asyncio.Event()
        self.steps = self.rollouts = 0
        self.stop = False
        self.rewards: list[float] = []

    async def serve(self, name: str) -> None:
        """Weights out, trajectories in; for as long as there is training, with whoever is the engine."""
        while not self.stop:
            try:
                world = await mw.join_async(
                    name, 0, 2, store=self.args.store, backend=self.args.backend, device=self.args.device,
                    timeout=PATIENCE,
                )  # fmt: skip
            except mw.JoinError as error:
                say("%s is not there: %s", name, type(error).__name__)
                if not self.complete.is_set() and not isinstance(error, mw.JoinAbandonedError):
                    raise
                await asyncio.sleep(0.1)
                continue
            say("%s is here, generation %d, from step %d on", name, world.generation, self.steps)
            self.present.add(name)
            if len(self.present) == self.engines:
                self.complete.set()
            try:
                await self._play(world)
            except mw.BrokenWorldException as error:
                say("%s: %s", error.cause, error)
            self.present.discard(name)

    async def _play(self, world: mw.World) -> None:
        while not self.stop:
            await world.aio.broadcast(word(GO_ON, world.device), 0)
            await world.aio.broadcast(self.learner.weights(), 0)
            batch = torch.empty(BATCH, device=world.device)
            await world.aio.recv(batch, 1)
            self.fresh.append(batch)
            self.rewards.append(batch[:, -1].mean().item())
            self.rollouts += 1
        await world.aio.broadcast(word(STOP, world.device), 0)
        await asyncio.to_thread(leave, world)

    async def finish(self) -> bool:
        """End the training; returns whether both trainers have the same weights."""
        world = self.learner.world
        await world.aio.broadcast(word(STOP, world.device), 0)
        same = await self.learner.same_everywhere()
        await asyncio.to_thread(leave, world)
        return same

    async def train(self, steps: int, until: str = "") -> None:
        """Train for so many steps, and for as long as an engine that `until` names is not there yet."""
        world = self.learner.world
        began = last = time.monotonic()
        first, played, longest = self.steps, self.rollouts, 0.0
        while self.steps < first + steps or (until and until not in self.present):
            if not self.fresh:
                await asyncio.sleep(0.001)
                continue
            batch = self.fresh[-1]
            await world.aio.broadcast(word(GO_ON, world.device), 0)
            await world.aio.broadcast(batch, 0)
            await self.learner.step(batch)
            self.steps += 1
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            await asyncio.sleep(0.005)
        seconds = time.monotonic() - began
        say(
            "%d engines: %.0f steps/s, %.0f rollouts/s, reward %.2f, longest step %.0f ms",
            len(self.present), (self.steps - first) / seconds, (self.rollouts - played) / seconds,
            sum(self.rewards[-20:]) / 20, longest * 1000,
        )  # fmt: skip
