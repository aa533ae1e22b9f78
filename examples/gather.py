"""gather in two worlds, with unmodified torch.distributed: rank 0 of each world collects everyone's tensor.

python examples/gather.py
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import torch
import torch.distributed as dist

import multiworld as mw
from _two_worlds import in_two_worlds, show


def turn(world: mw.World, number: int) -> None:
    """Collect everyone's tensor in rank 0."""
    with world:
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = torch.tensor([float(10 * rank + number)], device=world.device)
        everyones = [torch.zeros_like(mine) for _ in range(size)] if rank == 0 else None
        dist.gather(mine, everyones, dst=0)
    if everyones is not None:
        show(
            world, number, [part.item() for part in everyones], [float(10 * r + number) for r in range(size)]
        )


if __name__ == "__main__":
    in_two_worlds(turn, __doc__)
