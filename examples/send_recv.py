"""send and recv in two worlds, in all three ways: torch.distributed in `with`, methods, awaitable methods.

A value goes once around each world: every rank adds its own number and hands it on.

    python examples/send_recv.py
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import torch
import torch.distributed as dist

import multiworld as mw
from _two_worlds import in_two_worlds, show


async def turn(world: mw.World, number: int) -> None:
    """Pass a tensor around the ring of ranks."""
    before, after = (world.rank - 1) % world.world_size, (world.rank + 1) % world.world_size
    tensor = torch.tensor([number], device=world.device)
    if world.rank == 0:
        with world:  # 1. unmodified torch: this sends in this world, whatever other tasks have selected
            dist.send(tensor, after)
        await world.aio.recv(tensor, before)  # 2. awaited: the other world goes on meanwhile
    else:
        world.recv(tensor, before)  # 3. methods; these processes have one world and may block
        tensor += world.rank
        world.send(tensor, after)
    visited = world.rank or world.world_size - 1
    show(world, number, tensor, [number + sum(range(visited + 1))])


if __name__ == "__main__":
    in_two_worlds(turn, __doc__)
