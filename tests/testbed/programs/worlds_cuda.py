"""Worlds on NCCL beside what CUDA does to all of a process: its lock, and an error that makes the device useless."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from programs.worldkit import broken, full, joined, meet, same, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank

TICK = 0.005
ROUNDS = 20  # before the fault, of each loop
LONG = 600.0


class Loop(threading.Thread):
    """Does something over and over until told to end; notes when each round began, and how long it took."""

    def __init__(self, step: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.step = step
        self.over = threading.Event()
        self.rounds: list[tuple[float, float]] = []
        self.start()

    def run(self) -> None:
        while not self.over.is_set():
            began = time.monotonic()
            self.step()
            self.rounds.append((began, time.monotonic() - began))

    def slowest_ms(self, since: float) -> float:
        """The longest round that went on at that time, or later."""
        return 1000 * max((took for began, took in list(self.rounds) if began + took >= since), default=0.0)


def _sum(world: Any, value: float, device: Any) -> float:
    t = full(value, device, 1)
    world.all_reduce(t)
    return float(t.cpu().item())


def locked(me: Rank) -> None:
    """While NCCL's abort of a world holds CUDA's lock: another world's operations, one's on gloo, and Python's threads."""
    cpu = torch.device("cpu")
    if me.rank < 2:
        lost = joined(me, "lost", world_size=2)
    if me.rank == 1:
        me.event("ready")
        me.hear("lost", timeout=LONG)
        return
    number = me.rank // 2
    beside = [
        (joined(me, name, rank=number, world_size=2, backend=backend), device)
        for name, backend, device in (("lives", me.config["backend"], me.device), ("gloo", "gloo", cpu))
    ]
    if me.rank == 2:
        answers = [
            threading.Thread(target=lambda w=world, d=device: all(iter(lambda: _sum(w, 1, d) > 0, False)))
            for world, device in beside
        ]
        for each in answers:
            each.start()
        me.event("ready")
        for each in answers:
            each.join()
        return
    loops = [Loop(lambda w=world, d=device: _sum(w, 1, d)) for world, device in beside]
    loops.append(Loop(lambda: time.sleep(TICK)))
    assert until(lambda: all(len(each.rounds) > ROUNDS for each in loops))
    aborts = me.bed.count("aborts")
    me.event("ready")
    since = time.monotonic()
    with broken(me, "broken"):
        lost.recv(full(0, me.device), 1)
    assert until(lambda: me.bed.count("aborts") > aborts)
    assert lost.close(LONG)  # the abort has ended
    counts = [len(each.rounds) for each in loops]
    assert until(lambda: all(len(each.rounds) > count + 2 for each, count in zip(loops, counts, strict=True)))
    names = ("lives", "gloo", "python")
    me.event("slowest", aborts=me.bed.count("aborts") - aborts,
             **{name: each.slowest_ms(since) for name, each in zip(names, loops, strict=True)})  # fmt: skip
    for each in loops:
        each.over.set()
        each.join(60)
    for world, device in beside:
        _sum(world, -9, device)


def sticky(me: Rank) -> None:
    """A launch of rank 1 makes its device useless: its world breaks, worlds on gloo and messages go on, the program ends."""
    world, other = joined(me), joined(me, "other")
    beside = joined(me, "beside", backend="gloo")
    for each in (world, other):
        each.all_reduce(full(1, me.device))
    meet(me, "joined")
    tensor = full(1, me.device)
    if me.rank:
        me.bed.set("DEVICE_ERROR_FROM", 1)
    for name, each in (("broken", world), ("later", other)):
        with broken(me, name):
            try:
                each.all_reduce(tensor)
            except Exception as exc:
                me.event("told", text=f"{exc}\n{exc.__cause__}")
                raise
    t, came = full(me.rank + 1, "cpu"), full(0, "cpu")
    beside.all_reduce(t)
    beside.send(t + me.rank, 1 - me.rank)
    beside.recv(came, 1 - me.rank)
    me.event("beside", right=same(t, 3) and same(came, 4 - me.rank))
    meet(me, "done")
    me.attempt("closed", lambda: [each.close(20) for each in (world, other, beside)])
    me.event("ends")
    sys.exit(me.config["code"])
