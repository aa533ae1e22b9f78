"""Which way an operation goes, and that both ways mean the same; in one process, with a world of one member."""

import asyncio

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import multiworld as mw
from multiworld._c10d.endings import Habit
from multiworld._c10d.state import owner_of


@pytest.fixture
def world():
    made = mw.join("hot", 0, 1, store=dist.HashStore(), backend="gloo", timeout=20)
    yield made
    assert made.close()


class Seen(TorchDispatchMode):
    """Counts what passes torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_tensors_go_to_the_backend_and_all_others_torchs_way(world):
    takes, plain = world._gen.direct.takes, torch.ones(3)
    assert takes(plain)
    for other in (
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, device="meta"),
        3,
    ):
        assert not takes(other)
    with Seen() as seen:
        assert not takes(plain)
        world.all_reduce(plain)
    assert any("c10d" in name for name in seen.names)
    with torch.profiler.profile() as profile:
        assert not takes(plain)
        world.all_reduce(plain)
    assert any("allreduce" in event.key or "all_reduce" in event.key for event in profile.key_averages())
    number = torch.tensor([1 + 2j])
    world.all_reduce(number)
    assert number.item() == 1 + 2j


def test_values_and_errors_are_torchs(world):
    one, two = torch.arange(4.0), torch.zeros(4)
    world.all_reduce(one, dist.ReduceOp.MAX)
    world.broadcast(one, 0)
    world.reduce(one, 0)
    world.all_gather_into_tensor(two, one)
    assert torch.equal(two, torch.arange(4.0))
    parts = [torch.zeros(4)]
    world.all_gather(parts, one)
    assert torch.equal(parts[0], one)
    world.barrier()

    def failed(fn):
        with pytest.raises(Exception) as caught:
            fn()
        return type(caught.value), str(caught.value).partition("\n")[0]

    for mine, torchs in (
        (lambda: world.broadcast(one, 5), lambda: dist.broadcast(one, 5)),
        (lambda: world.all_reduce(3), lambda: dist.all_reduce(3)),
        (lambda: world.all_reduce(one, "sum"), lambda: dist.all_reduce(one, "sum")),
    ):
        with world:
            expected = failed(torchs)
        assert failed(mine) == expected


def test_awaited_collectives_and_the_end(world):
    async def main():
        tensor = torch.ones(2)
        for _ in range(40):  # more than may end without a turn of the loop
            await world.aio.all_reduce(tensor)
            await world.aio.broadcast(tensor, 0)
        return tensor

    assert torch.equal(asyncio.run(main()), torch.ones(2))
    group = world.group
    assert owner_of(group) is world._gen.c10d
    world.close()
    assert owner_of(group) is None
    with pytest.raises(mw.WorldClosedError):
        world.all_reduce(torch.ones(1))
    with pytest.raises(mw.WorldClosedError):
        asyncio.run(world.aio.all_reduce(torch.ones(1)))


def test_looking_stops_where_it_does_not_pay_and_comes_back():
    habit = Habit()
    looked = 0
    for _ in range(1000):
        if habit.looks():
            looked += 1
            habit.learn(hit=False)
    assert looked < 40
    while not habit.looks():
        pass
    habit.learn(hit=True)
    assert all(habit.looks() for _ in range(100))
