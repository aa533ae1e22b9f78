"""What a world on NCCL costs beside plain torch in the same processes: time of operations, memory of worlds."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from programs.patches import resident
from programs.worldkit import full, joined, meet

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank

_ENOUGH = 0.05
"""Seconds that the operations of one round take, about."""


def times(me: Rank) -> None:
    """Time `send`/`recv` and `all_reduce` of plain torch, a world, and a world awaited, in turns; to the device's end."""
    me.init(me.config["backend"])
    world = joined(me)
    found: dict[str, list[float]] = {}
    loop = asyncio.new_event_loop()
    for size in me.config["sizes"]:
        t = torch.empty(size, dtype=torch.uint8, device=me.device).fill_(1)
        wide = t.view(torch.float32)
        for op, tensor in (("send/recv", t), ("all_reduce", wide)):
            calls = _calls(op, tensor, world, me.rank, loop)
            for call in calls.values():  # connected, and its code is loaded
                _timed(call, 1)
            count = _agreed(world, _timed(calls["plain"], 1))
            for _ in range(me.config["rounds"]):
                for name, call in calls.items():
                    found.setdefault(f"{op} {size} {name}", []).append(_timed(call, count))
        del t, wide
    loop.close()
    me.event("times", found={name: median(each) for name, each in found.items()})
    meet(me, "done")
    world.close()
    dist.destroy_process_group()


def _calls(
    op: str, t: torch.Tensor, world: Any, rank: int, loop: asyncio.AbstractEventLoop
) -> dict[str, Callable[[int], None]]:
    """Return by name what does an operation so many times; a send and the receive of its answer are two."""

    def blocking(send: Any, recv: Any, all_reduce: Any) -> Callable[[int], None]:
        def run(count: int) -> None:
            for _ in range(count):
                if op == "all_reduce":
                    all_reduce(t)
                else:
                    for sends in (rank == 0, rank == 1):
                        (send if sends else recv)(t, 1 - rank)
                        torch.cuda.current_stream().synchronize()
                torch.cuda.current_stream().synchronize()

        return run

    async def awaiting(count: int) -> None:
        for _ in range(count):
            if op == "all_reduce":
                await world.aio.all_reduce(t)
            else:
                for sends in (rank == 0, rank == 1):
                    await (world.aio.send if sends else world.aio.recv)(t, 1 - rank)

    return {
        "plain": blocking(dist.send, dist.recv, dist.all_reduce),
        "world": blocking(world.send, world.recv, world.all_reduce),
        "awaited": lambda count: loop.run_until_complete(awaiting(count)),
    }


def _timed(call: Callable[[int], None], count: int) -> float:
    began = time.perf_counter()
    call(count)
    return (time.perf_counter() - began) / count


def _agreed(world: Any, seconds: float) -> int:
    """All members do as many: what the first one finds enough."""
    t = full(max(1, min(200, int(_ENOUGH / seconds))), world.device, 1)
    world.broadcast(t, 0)
    return int(t.cpu().item())


def memory(me: Rank) -> None:
    """Join worlds of all ranks, one after the other, and tell after some of them what they hold."""
    device = me.device
    torch.cuda.set_device(device)
    torch.ones(1).to(device)  # the context is made
    worlds: list[Any] = []
    for wanted in me.config["worlds"]:
        meet(me, f"before {wanted}")
        began, tries = time.perf_counter(), wanted - len(worlds)
        while len(worlds) < wanted:
            worlds.append(joined(me, f"w{len(worlds)}"))
        seconds = (time.perf_counter() - began) / max(1, tries)
        meet(me, f"joined {wanted}")
        me.event("held", worlds=wanted, gpu=_gpu_used(device), host=resident(), join=seconds)
        meet(me, f"told {wanted}")
    for world in worlds:
        world.close()
    me.event("closed")


def _gpu_used(device: torch.device) -> int:
    """Bytes of the GPU that all processes on it have."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
