"""The state of every optimizer and scheduler of torch travels, and goes on where it was loaded as where it came from."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
from kits.contract.statekit import same
from torch import optim
from torch.optim import lr_scheduler, swa_utils

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [1, 2])], [2]
    ),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [3])]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
}
BASES = {optim.Optimizer, lr_scheduler.LRScheduler}
MOMENTUM = {"SGD": {"lr": 0.1, "momentum": 0.9}, "RMSprop": {"momentum": 0.9}, "Adam": {"amsgrad": True}}


def classes(module, base):
    """Names of what a module has of a kind; an underscore is an old name of the base."""
    found = {name: each for name, each in vars(module).items() if inspect.isclass(each)}
    return sorted(
        name for name, each in found.items()
        if issubclass(each, base) and each not in BASES and name[0] != "_"
    )  # fmt: skip


OPTIMIZERS = classes(optim, optim.Optimizer)


class Training:
    def __init__(self, optimizer, scheduler="StepLR"):
        torch.manual_seed(0)
        sparse = optimizer == "SparseAdam"
        self.layer = torch.nn.Embedding(4, 2, sparse=True) if sparse else torch.nn.Linear(4, 2, bias=False)
        self.given = torch.tensor([1, 3]) if sparse else torch.ones(1, 4)
        options = MOMENTUM.get(optimizer, {})
        self.optimizer = getattr(optim, optimizer)(self.layer.parameters(), **options)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)

    def loss(self):
        self.optimizer.zero_grad()
        loss = self.layer(self.given).square().sum()
        loss.backward()
        return loss

    def train(self, steps):
        for _ in range(steps):
            loss = self.optimizer.step(self.loss)
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            else:
                self.scheduler.step()

    def state(self):
        parts = {"layer": self.layer, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: each.state_dict() for name, each in parts.items()}

    def load(self, state):
        for name, each in state.items():
            getattr(self, name).load_state_dict(each)


def test_none_is_left_out():
    plateau = lr_scheduler.ReduceLROnPlateau  # no LRScheduler in older versions
    found = {*classes(lr_scheduler, lr_scheduler.LRScheduler), *classes(lr_scheduler, plateau)}
    assert found | {"SWALR"} == set(SCHEDULERS)
    assert {"Adam", "SGD", "LBFGS", "SparseAdam"} < set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*((each, "StepLR") for each in OPTIMIZERS), *(("SGD", each) for each in SCHEDULERS)],
)
# SequentialLR and ChainedScheduler step the others in their own order; SequentialLR says so with epochs, too.
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_it_goes_on_as_where_it_came_from(lanes, pair, optimizer, scheduler):
    there, here = Training(optimizer, scheduler), Training(optimizer, scheduler)
    if any(map(callable, there.scheduler.state_dict().values())):
        pytest.skip("torch 2.4's SWALR has a function in its state, which is refused")
    there.train(3)
    got = lanes.carried(pair, there.state(), here.state())
    assert same(got, {**there.state(), "layer": dict(there.state()["layer"])})
    here.load(got)
    for each in (there, here):
        each.train(4)
    assert same(here.state(), there.state())


def test_milestones_are_a_counter(lanes, pair):
    there = Training("SGD", "MultiStepLR")
    got = lanes.carried(pair, there.state(), Training("SGD", "MultiStepLR").state())
    assert type(got["scheduler"]["milestones"]) is Counter
    assert got["scheduler"]["milestones"] == Counter([2, 4, 4])
