"""reduce in two worlds, as a method of the world: rank 0 of each world gets the largest of everyone's values.

python examples/reduce.py
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import torch
import torch.distributed as dist

import multiworld as mw
from _two_worlds import in_two_worlds, show


def turn(world: mw.World, number: int) -> None:
    """Reduce everyone's tensor into rank 0's."""
    tensor = torch.tensor([world.rank, -world.rank, number], device=world.device)
    world.reduce(tensor, 0, dist.ReduceOp.MAX)
    if world.rank == 0:
        show(world, number, tensor, [world.world_size - 1, 0, number])


if __name__ == "__main__":
    in_two_worlds(turn, __doc__)
