"""The trainer: one thread for each engine takes batches, the main one learns and publishes."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

import multiworld as mw
from cartpole.engine import BUCKET, HEAD
from cartpole.policy import COLUMNS, STEPS, Learner
from multiworld import weights

__all__ = ["FRESH", "Trainer", "trainer"]

TOGETHER = 4
"""Batches of a step."""
FRESH = 0.5
"""Seconds after a version was published in which a batch may still begin with the one before."""


@dataclass
class Story:
    """What happened in a part of the run.

    Attributes:
        seconds: that it took.
        steps: of the learner.
        samples: that were learned from.
        stall: seconds, the longest between two steps.
        publishing: seconds, the longest that publishing took.
        stale: batches that were begun with weights of which newer ones had long been published, see `FRESH`.
        mixed: batches that were played with weights that are no version.
        lost: worlds that broke.
        times: when each step had ended (time.monotonic).
        reward: mean of the last episodes.
    """

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    stall: float = 0.0
    publishing: float = 0.0
    stale: int = 0
    mixed: int = 0
    lost: int = 0
    reward: float = 0.0
    times: list[float] = field(default_factory=list)


class Trainer:
    """See the module."""

    def __init__(self, store: str, engines: int, fresh: float) -> None:
        self.store = store
        self.fresh = fresh
        self.learner = Learner()
        self.publisher = weights.Publisher("policy", self.learner.net, store, timeout=20, bucket_bytes=BUCKET)
        self.batches: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue(2 * engines)
        self.published: list[tuple[int, list[int]]] = []  # by version: when (ns), and the digest
        self.story = Story()
        self.publish()
        for seat in range(engines):
            threading.Thread(target=self.follow, args=(seat,), daemon=True).start()

    def follow(self, seat: int) -> None:
        """Take the batches of one engine, and of those that follow it."""
        while True:
            with contextlib.suppress(mw.MultiworldError):  # none came in time, or it was lost in the join
                world = mw.join(f"rollouts/{seat}", 0, 2, store=self.store, timeout=20)
                try:
                    while True:
                        head, batch = torch.zeros(HEAD, dtype=torch.int64), torch.zeros(STEPS, COLUMNS)
                        world.recv(head, 1)
                        world.recv(batch, 1)
                        self.batches.put((head, batch))
                finally:
                    self.story.lost += 1
                    world.close()

    def publish(self) -> None:
        """Publish the next version."""
        version, began = len(self.published), time.monotonic()
        self.publisher.publish(version)
        self.story.publishing = max(self.story.publishing, time.monotonic() - began)
        digest = bytearray.fromhex(weights.digest(self.learner.net, BUCKET))
        self.published.append((time.monotonic_ns(), torch.frombuffer(digest, dtype=torch.int64).tolist()))

    def step(self) -> None:
        """Learn once, and publish."""
        taken = [self.batches.get(timeout=60) for _ in range(TOGETHER)]
        for head, _ in taken:
            version, began, *digest = head.tolist()
            self.story.mixed += digest != self.published[version][1]
            newer = self.published[version + 1 : version + 2]
            self.story.stale += any(began - at > self.fresh * 1e9 for at, _ in newer)
        self.learner.learn([batch for _, batch in taken])
        self.publish()
        self.story.steps += 1
        self.story.samples += TOGETHER * STEPS

    def part(self, until: Connection) -> dict[str, Any]:
        """Learn until something is said; returns what happened."""
        self.story = Story()
        begin = before = time.monotonic()
        while not until.poll():
            self.step()
            now = time.monotonic()
            self.story.times.append(now)
            self.story.stall = max(self.story.stall, now - before)
            before = now
        until.recv()
        self.story.seconds, self.story.reward = time.monotonic() - begin, self.learner.reward
        return asdict(self.story)


def trainer(store: str, engines: int, supervisor: Connection, fresh: float) -> None:
    """Learn in parts, as the supervisor says."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    made = Trainer(store, engines, fresh)
    made.publisher.wait(engines, 60)
    for _ in range(2 * engines):  # warm
        made.step()
    supervisor.send(None)
    while True:
        supervisor.send(made.part(supervisor))
        if supervisor.recv() == "end":
            break
    made.publisher.close()
