"""A game of one move: eight numbers are seen, one of four actions is right; a fixed secret matrix says which.

The policy is a linear layer; its weights, and its gradients, travel as one flat tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import multiworld as mw

__all__ = ["BATCH", "Learner", "Player"]

SEES, ACTIONS, GAMES = 8, 4, 64
BATCH = (GAMES, SEES + 2)
"""Shape of a batch of games: what was seen, the action, the reward (1 or 0)."""


class Player:
    """Plays with the weights in `weights`."""

    def __init__(self, device: torch.device) -> None:
        self.model = nn.Linear(SEES, ACTIONS).to(device)
        self.weights = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        self.secret = torch.randn(SEES, ACTIONS, generator=torch.Generator().manual_seed(7)).to(device)

    @torch.no_grad()
    def play(self) -> Tensor:
        """A batch of games, of shape BATCH, float32."""
        nn.utils.vector_to_parameters(self.weights, self.model.parameters())
        seen = torch.randn(GAMES, SEES, device=self.weights.device)
        actions = torch.distributions.Categorical(logits=self.model(seen)).sample()
        rewards = actions == (seen @ self.secret).argmax(1)
        return torch.cat([seen, actions[:, None], rewards[:, None]], 1)


class Learner:
    """Learns by REINFORCE from its part of each batch; gradients are added up in the learners' world."""

    def __init__(self, world: mw.World) -> None:
        torch.manual_seed(0)  # the same beginning for all learners
        self.world = world
        self.model = nn.Linear(SEES, ACTIONS).to(world.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def weights(self) -> Tensor:
        """All weights as one tensor."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    async def step(self, batch: Tensor) -> None:
        """Learn from this learner's part of the batch, and from the others' gradients."""
        part = batch.chunk(self.world.world_size)[self.world.rank]
        seen, actions, rewards = part[:, :SEES], part[:, SEES], part[:, SEES + 1]
        chosen = torch.distributions.Categorical(logits=self.model(seen)).log_prob(actions)
        self.optimizer.zero_grad()
        (-(chosen * (rewards - rewards.mean())).mean()).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None  # noqa: S101  (backward has just made it)
            await self.world.aio.all_reduce(parameter.grad)
            parameter.grad /= self.world.world_size
        self.optimizer.step()

    async def same_everywhere(self) -> bool:
        """Whether all learners have the same weights."""
        mine = self.weights()
        everyones = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        await self.world.aio.all_gather(everyones, mine)
        return all(torch.equal(each, mine) for each in everyones)
