"""The training of the sharded model's example in one process, with the whole model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from digits.data import digits
from digits.model import History, accuracy, model
from digits.sharding import optimizer_of
from multiworld.elastic import ElasticBatchSampler

__all__ = ["alone"]


class One:
    """A world of one process, as far as a sampler asks."""

    generation, rank, world_size, step = 1, 0, 1, 0


def alone(epochs: int, batch: int) -> dict[str, Any]:
    """Make the same steps in this process, with the whole model."""
    training, test = digits()
    net, world, sampler, history = model(), One(), ElasticBatchSampler(len(training), batch), History()
    optimizer = optimizer_of(net)
    sampler.follow(world)
    while sampler.epoch < epochs:
        for pixels, labels in DataLoader(training, batch_sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(pixels), labels, reduction="sum") / batch
            loss.backward()
            optimizer.step()
            history.steps.append([loss.item(), world.world_size])
            world.step += 1
    return {"steps": history.steps, "accuracy": accuracy(net, test)}
