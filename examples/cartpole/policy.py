"""A policy for gymnasium's CartPole, how it is played, and how it learns (REINFORCE)."""

from __future__ import annotations

import gymnasium
import torch
from torch import Tensor, nn

__all__ = ["COLUMNS", "STEPS", "Learner", "Player", "policy"]

STEPS = 128
"""Of a batch."""
SEES = 4
COLUMNS = SEES + 3
"""Of a batch: what was seen, the action, what was won from there on, and the whole episode's reward at its end."""
DISCOUNT = 0.95


def policy() -> nn.Module:
    """Scores of the two actions, by what is seen."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SEES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


class Player:
    """Plays batch after batch with the policy's present weights."""

    def __init__(self, net: nn.Module, seed: int) -> None:
        self._net = net
        self._game = gymnasium.make("CartPole-v1")
        self._seen, _ = self._game.reset(seed=seed)
        self._random = torch.Generator().manual_seed(seed)
        self._reward = 0.0

    @torch.no_grad()
    def play(self) -> Tensor:
        """One batch, of shape (STEPS, COLUMNS)."""
        batch = torch.zeros(STEPS, COLUMNS)
        begin = 0
        for step in range(STEPS):
            seen = torch.as_tensor(self._seen)
            action = torch.multinomial(self._net(seen).softmax(0), 1, generator=self._random)
            self._seen, reward, fell, late, _ = self._game.step(int(action))
            self._reward += float(reward)
            batch[step, :SEES], batch[step, SEES] = seen, action
            if fell or late:
                batch[step, -1], self._reward = self._reward, 0.0
                self._seen, _ = self._game.reset()
            if fell or late or step == STEPS - 1:
                won = 0.0 if fell else 1 / (1 - DISCOUNT)  # as if it went on for ever
                for at in range(step, begin - 1, -1):
                    won = 1 + DISCOUNT * won
                    batch[at, SEES + 1] = won
                begin = step + 1
        return batch


class Learner:
    """Learns from batches; `reward` is the mean of the last episodes'."""

    def __init__(self) -> None:
        self.net = policy()
        self.reward = 0.0
        self._optimizer = torch.optim.Adam(self.net.parameters(), lr=2e-3)
        # Steps as long as the first ones walk off again from what was learned, after a thousand of them.
        self._slower = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: 1 / (1 + (step / 250) ** 2)
        )

    def learn(self, batches: list[Tensor]) -> None:
        """Make one step with some batches."""
        batch = torch.cat(batches)
        won = batch[:, SEES + 1]
        ends = batch[batch[:, -1] > 0, -1]
        if len(ends):
            self.reward += 0.1 * (float(ends.mean()) - self.reward)
        chosen = torch.distributions.Categorical(logits=self.net(batch[:, :SEES]))
        loss = -(chosen.log_prob(batch[:, SEES]) * (won - won.mean()) / (won.std() + 1)).mean()
        self._optimizer.zero_grad()
        (loss - 0.01 * chosen.entropy().mean()).backward()
        self._optimizer.step()
        self._slower.step()
