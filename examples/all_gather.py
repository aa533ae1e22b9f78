"""all_gather in two worlds, awaited: the leader is in both at once, as two tasks of one event loop.

python examples/all_gather.py
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import torch

import multiworld as mw
from _two_worlds import in_two_worlds, show


async def turn(world: mw.World, number: int) -> None:
    """Give everyone everyone's tensor."""
    mine = torch.tensor([float(10 * world.rank + number)], device=world.device)
    everyones = [torch.zeros_like(mine) for _ in range(world.world_size)]
    await world.aio.all_gather(everyones, mine)
    show(
        world,
        number,
        [part.item() for part in everyones],
        [float(10 * r + number) for r in range(world.world_size)],
    )


if __name__ == "__main__":
    in_two_worlds(turn, __doc__)
