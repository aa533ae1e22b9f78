"""Worlds that are none, as the numbers look at them, in a process of their own making."""

from __future__ import annotations

import contextlib
import time

from multiworld._core.operations.log import OperationLog
from multiworld._generation.process_totals import ProcessTotals
from multiworld.events import (
    Breakage,
    Cause,
    State,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
)
from multiworld.metrics import collector as collector_module
from multiworld.metrics import health, recorder
from multiworld.metrics.recorder import Recorder

HOUSES = (collector_module, health, recorder)


class FakeWorld:
    """One world and its one generation: `gen` is itself."""

    def __init__(self, name, number=1, size=4):
        self.name, self.number, self.generation, self.size = name, number, number, size
        self.state, self.ready, self.busy, self.breakage = State.ACTIVE, True, (), None
        self.log = OperationLog(0, size)
        self._gen = self.operations = self

    def breaks(self, cause=Cause.CRASHED, ago=0.0):
        self.state, self.ready = State.BROKEN, False
        self.breakage = Breakage(cause, (1,), "rank 1: gone", time.monotonic() - ago)

    def waits(self, seconds, ended=None):
        entry = [self.log.world, "recv", None, 4, 1, 0, time.monotonic() - seconds, ended]
        self.log.append(entry)


class FakeProcess:
    """What `registry`, `process_totals` and `recorder` are to the numbers."""

    def __init__(self, monkeypatch):
        self.known, self.names, self.still = {}, (), None
        self.totals, self.recorder = ProcessTotals(), Recorder()
        for house in HOUSES:
            monkeypatch.setattr(house, "registry", self, raising=False)
        monkeypatch.setattr(collector_module, "process_totals", self.totals)
        monkeypatch.setattr(collector_module, "recorder", self.recorder)

    def worlds(self):
        return dict(self.known)

    def joining(self):
        return self.names

    def watchdog_still(self):
        return self.still

    def add(self, name, **arguments):
        world = self.known[name] = FakeWorld(name, **arguments)
        self.totals.begin(name, world.log.totals)
        return world

    def joins(self, name, took=0.0, at=100.0):
        self.recorder.apply(WorldJoining(name, 0, 0, at))
        self.recorder.apply(WorldActive(name, 1, 0, at + took, 4))

    def fails(self, name, at=100.0):
        self.recorder.apply(WorldJoinFailed(name, 0, 0, at, OSError()))

    def breaks(self, name, cause=Cause.CRASHED, at=200.0):
        self.recorder.apply(WorldBroken(name, 1, 0, at, Breakage(cause, (1,), "gone", at)))

    def closes(self, name, at=300.0):
        self.known.pop(name, None)
        self.recorder.apply(WorldClosed(name, 1, 0, at))


@contextlib.contextmanager
def collected(process, **arguments):
    made = collector_module.WorldsCollector(**arguments)
    try:
        yield made
    finally:
        process.recorder.end()


def numbers(made):
    """Samples by name and labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in made.collect()
        for sample in family.samples
    }
