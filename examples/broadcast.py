"""broadcast in two worlds, as a method of the world: no `with`, no group argument.

python examples/broadcast.py
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import torch

import multiworld as mw
from _two_worlds import in_two_worlds, show


def turn(world: mw.World, number: int) -> None:
    """Each round another rank gives its tensor to everyone."""
    source = number % world.world_size
    tensor = torch.full((2,), float(10 * world.rank + number), device=world.device)
    world.broadcast(tensor, source)
    show(world, number, tensor, [float(10 * source + number)] * 2)


if __name__ == "__main__":
    in_two_worlds(turn, __doc__)
