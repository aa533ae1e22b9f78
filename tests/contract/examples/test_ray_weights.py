"""examples/ray_actors.py without Ray: the trainer's weights, while its engines' tasks learn beside each other."""

from __future__ import annotations

import asyncio
import importlib
import sys
import types

import pytest
import torch
from kits.contract.runkit import ROOT

pytestmark = pytest.mark.everyday


@pytest.fixture
def actors(monkeypatch):
    """The example as a module, with an empty one in the place of Ray."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("ray_actors")
    for name in ("ray_actors", "_ctrl_c", "_picture"):
        sys.modules.pop(name, None)


def test_weights_under_way_are_not_changed_by_another_engines_gradient(actors, monkeypatch):
    class World:
        """An engine's world: what is sent to "slow" is on its way until the gradient of "quick" is in the weights."""

        def __init__(self, name, *_, **__):
            self.name, self.aio, self.sent = name, self, 0

        async def send(self, tensor, dst):
            self.sent += 1
            if self.name == "quick" and self.sent == 2:
                learned.set()
            if self.name == "slow" and self.sent == 1:
                before = tensor.clone()
                await asyncio.wait_for(learned.wait(), 30)
                seen.append(torch.equal(tensor, before))
                await trainer.stop()
            await asyncio.sleep(0)

        async def recv(self, tensor, src):
            tensor.fill_(1)

    monkeypatch.setattr(actors, "join", World)
    learned, seen = asyncio.Event(), []
    trainer = actors.Trainer(None, ("slow", "quick"))
    asyncio.run(trainer.train())
    assert seen == [True]
    assert float(trainer.weights.max()) < 0
