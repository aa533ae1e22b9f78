"""A model and its optimizer, sharded by FSDP2 over the present members, and saved to a folder that all reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import multiworld as mw
from digits.model import model
from multiworld.elastic import reshard

__all__ = ["Sharded", "optimizer_of"]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return what a model learns with."""
    return torch.optim.AdamW(net.parameters(), lr=0.002)


class Sharded:
    """Made anew in each generation, inside of a block of its world.

    An even number of members has two shards, each held by half of them (HSDP: what one loses, another has). An odd
    number has a shard for each.
    """

    def __init__(self, members: int) -> None:
        shards = members if members % 2 else 2
        mesh = init_device_mesh("cpu", (members // shards, shards), mesh_dim_names=("replicate", "shard"))
        self.net: nn.Module = model()
        for layer in self.net.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.optimizer = optimizer_of(self.net)

    def state(self) -> dict[str, Any]:
        """What is here of all, also when the world is broken. An optimizer that is new is as after one step."""
        return dict(zip(("net", "optimizer"), get_state_dict(self.net, self.optimizer), strict=True))

    def take_over(
        self, world: mw.World, old: Sharded | None, step: int, folder: Path
    ) -> tuple[int, dict[str, Any] | None]:
        """Take the values from what the members have, else from the last checkpoint, else begin.

        Returns the step, and what was saved with it, if it is of a checkpoint, or the beginning.
        """
        state = self.state()
        missing = reshard(world, None if old is None else old.state(), state, step)
        more: dict[str, Any] | None = None
        if missing:
            step = self._last(world, folder)
            if not step:
                self.optimizer.state.clear()
                return 0, {"epoch": 0, "taken": 0}
            more = {"epoch": 0, "taken": 0}
            dcp.load({**state, "sampler": more}, checkpoint_id=folder / str(step))
        set_state_dict(
            self.net, self.optimizer, model_state_dict=state["net"], optim_state_dict=state["optimizer"]
        )
        return step, more

    def save(self, folder: Path, step: int, sampler: dict[str, Any]) -> None:
        """Save a checkpoint: each member its shards."""
        dcp.save({**self.state(), "sampler": sampler}, checkpoint_id=folder / str(step))

    def _last(self, world: mw.World, folder: Path) -> int:
        """Return the step of the last checkpoint that is whole, as rank 0 sees it; 0 if there is none."""
        found = torch.tensor([max((int(each.parent.name) for each in folder.glob("*/.metadata")), default=0)])
        world.broadcast(found, 0)
        return int(found)
