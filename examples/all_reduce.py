"""all_reduce in two worlds, with unmodified torch.distributed.

Inside `with world:` every torch.distributed call means that world: its ranks, its size, its group.

    python examples/all_reduce.py
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import torch
import torch.distributed as dist

import multiworld as mw
from _two_worlds import in_two_worlds, show


def turn(world: mw.World, number: int) -> None:
    """Add up everyone's tensor."""
    tensor = torch.full((2,), float(world.rank + number), device=world.device)
    with world:
        dist.all_reduce(tensor)
        size = dist.get_world_size()
    total = sum(rank + number for rank in range(size))
    show(world, number, tensor, [float(total)] * 2)


if __name__ == "__main__":
    in_two_worlds(turn, __doc__)
