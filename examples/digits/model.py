"""The model, and what is noted of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

__all__ = ["History", "accuracy", "model"]


def model() -> nn.Sequential:
    """Return the model, the same in every process.

    In float64: how many members share a step's samples changes the last digits of its sums, and in float32
    that grows to 0.005 of a loss in 240 steps on some CPUs. What is compared here is whether samples and
    averages are right.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return net.double()


@torch.no_grad()
def accuracy(net: nn.Module, data: TensorDataset) -> float:
    """Return the part of the digits that are recognized, 0 to 1."""
    pixels, labels = data.tensors
    return float((net(pixels).argmax(1) == labels).float().mean())


class History:
    """Of each step the loss and how many members made it: a part of a world's state, so that newcomers have it.

    Attributes:
        steps: loss and members of each.
        generation: of the world, in which the last step was made; 0: the program does not say.
    """

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self.generation = 0

    def state_dict(self) -> dict[str, Any]:
        """As a world's state wants it."""
        return {"steps": self.steps, "generation": self.generation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another member's."""
        self.steps, self.generation = [list(each) for each in state["steps"]], state["generation"]
