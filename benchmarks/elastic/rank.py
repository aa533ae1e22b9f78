"""Processes of `elastic`: the one that members are forked from, and the one that keeps the store for tcp://."""

from __future__ import annotations

import time
from typing import Any

import torch

# What a member needs is loaded before it is forked.
import torch.distributed
import torch.distributed.distributed_c10d

import multiworld as mw
import multiworld._c10d.groups
import multiworld._c10d.routing.router
import multiworld._join.join
from benchmarks.elastic.herd import Herd, Line, Survivor
from benchmarks.measuring.forks import forever
from benchmarks.measuring.store import Meeting

_LEAST = 2
_TIMEOUT = 60.0
_HANG = 30.0


def make(rank: int, count: int, args: dict[str, Any]) -> Any:
    """Rank 0 forks the members, rank 1 keeps the store for tcp://."""
    torch.set_num_threads(1)
    return Members() if rank == 0 else Meeting()


def operate(world: mw.World) -> None:
    """One all_reduce of 4 bytes.

    Raises:
        RuntimeError: its result is wrong.
    """
    tensor = torch.ones(1)
    world.all_reduce(tensor)
    if tensor.item() != world.world_size:
        raise RuntimeError(f"all_reduce over {world.world_size} members gave {tensor.item()}")


def _lost(world: mw.World, line: Line) -> None:
    """Operate until the world breaks."""
    while True:
        try:
            operate(world)
        except mw.BrokenWorldException:  # noqa: PERF203  (it ends the loop)
            line.mark("noticed")
            return


def _whole(world: mw.World, line: Line, *, shrinks: bool) -> None:
    """From the break to the first operation, as a program's own loop does it."""
    while True:
        try:
            if shrinks:
                world.wait_active()
            else:
                world.reform()
            active = time.monotonic()
            operate(world)
        except (mw.JoinError, mw.BrokenWorldException):  # noqa: PERF203  (few tries)
            line.retries += 1
        else:
            line.times["active"] = active
            line.mark("first")
            return


class Members(Herd):
    """Commands of the process that members of a world are forked from."""

    def _member(self, number: int, count: int, how: dict[str, Any]) -> Survivor:
        world = mw.join(
            how["world"], None, (_LEAST, count), store=how["store"], timeout=_TIMEOUT, hang_timeout=_HANG,
            seat=f"member{number}", on_loss=how["on_loss"],
        )  # fmt: skip
        if world.world_size != count:
            raise RuntimeError(f"a world of {world.world_size}, where {count} were to meet")
        operate(world)

        def survive() -> dict[str, Any]:
            line = Line()
            _lost(world, line)
            _whole(world, line, shrinks=how["on_loss"] == "shrink")
            return line.told(world.generation, world.world_size)

        return survive, forever
