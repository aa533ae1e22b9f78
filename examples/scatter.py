"""scatter in two worlds, awaited: rank 0 of each world gives each rank its own part.

python examples/scatter.py
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import torch

import multiworld as mw
from _two_worlds import in_two_worlds, show


async def turn(world: mw.World, number: int) -> None:
    """Hand out rank 0's tensors."""
    mine = torch.zeros(2, device=world.device)
    parts = None
    if world.rank == 0:
        parts = [torch.full_like(mine, float(100 * rank + number)) for rank in range(world.world_size)]
    await world.aio.scatter(mine, parts, 0)
    show(world, number, mine, [float(100 * world.rank + number)] * 2)


if __name__ == "__main__":
    in_two_worlds(turn, __doc__)
