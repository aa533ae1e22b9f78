"""An operation of several steps, or that waits before it is posted, is of the generation in which it was called."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from kits.meetkit import PATIENCE, until

from multiworld import collectives, objects
from multiworld._c10d.waiter_pool import pool
from multiworld.aio import Aio
from multiworld.events import State
from multiworld.turns import COLLECTIVE, RECEIVE, Turns, message


class Generation:
    """Each operation of it is a step, which a rejoin in the background comes right after; with a lane or without."""

    world, rank, size, device_types, collectives = "w", 0, 2, {"cpu"}, None

    def __init__(self, world, *, lane):
        self.steps, self.over, self.stands, self._world = [], False, True, world
        self.lane = self if lane else None
        self.pg = self

    @property
    def direct(self):
        return SimpleNamespace(wait=None, takes=lambda *_: False)

    @property
    def state(self):
        return State.BROKEN if self.over else State.ACTIVE

    def step(self, name):
        if self.over:
            raise LookupError("this generation broke")
        self.steps.append(name)
        self.end()

    def end(self):
        self.over, self._world._gen = True, Generation(self._world, lane=self.lane is not None)

    def takes(self, _tensor):
        return True

    def send(self, *_):
        self.step("send")
        return SimpleNamespace(wait=lambda: True)

    def recv(self, *_):
        self.step("recv")
        return SimpleNamespace(wait=lambda: True)

    def receive(self, _tensor, src, _tag):
        self.step("recv")
        return src

    def post_send(self, *_):
        self.step("send")

    def post_receive(self, *_):
        self.step("recv")

    def begin_receive(self, _tensor, src, _tag):
        self.step("recv")
        return SimpleNamespace(done=True, error=None, sender=src), None

    def make(self):
        self.stands = True
        self.end()

    def explain(self, error):
        return error

    def told(self):
        pass

    def watch(self, _future):
        pass


class World(objects.ObjectCollectives):
    device = torch.device("cpu")

    def __init__(self, *, lane):
        self._gen = Generation(self, lane=lane)
        self._turns = Turns()
        self.aio = Aio(self, self._turns)

    @property
    def rank(self):
        return self._gen.rank

    @property
    def world_size(self):
        return self._gen.size


@pytest.fixture(autouse=True)
def torchs_way(monkeypatch):
    monkeypatch.setattr(collectives, "call", lambda gen, row, _args, _async: gen.step(row.name))
    yield
    pool.dismiss()


OBJECTS = {
    "send_object_list": ("send", (["x"], 1)),
    "recv_object_list": ("recv", ([None], 1)),
    "broadcast_object_list": ("broadcast", (["x"], 0)),
    "all_gather_object": ("all_gather", ([None] * 2, "x")),
    "gather_object": ("all_gather", ("x", [None] * 2)),
    "scatter_object_list": ("broadcast", ([None], ["x", "y"])),
}


def refused(world, gen, steps, call):
    """`call` raises the error of `gen`, in which these steps were taken, and none in the next one."""
    with pytest.raises(LookupError, match="this generation broke"):
        call()
    assert gen.steps == steps
    assert world._gen is not gen
    assert world._gen.steps == []


def awaited(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "torch"])
@pytest.mark.parametrize("face", ["blocking", "aio"])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_step_after_a_rejoin_is_none_of_the_next_generations(name, face, lane):
    world = World(lane=lane)
    step, args = OBJECTS[name]
    if face == "blocking":
        refused(world, world._gen, [step], lambda: getattr(world, name)(*args))
    else:
        refused(world, world._gen, [step], lambda: awaited(getattr(world.aio, name)(*args)))


@pytest.mark.parametrize(
    ("name", "args"),
    [("send", (1,)), ("isend", (1,)), ("recv", (1,)), ("irecv", (1,))],
)
def test_what_waited_for_torchs_group_is_not_posted_in_the_next_generation(name, args):
    world = World(lane=False)
    world._gen.stands = False
    refused(world, world._gen, [], lambda: awaited(getattr(world.aio, name)(torch.zeros(1), *args)))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("recv", (torch.zeros(1), 1)),
        ("irecv", (torch.zeros(1), 1)),
        ("recv_object_list", ([None], 1)),
        ("all_gather_object", ([None] * 2, "x")),
        ("all_reduce", (torch.zeros(1),)),
    ],
)
def test_one_whose_generation_broke_before_its_turn_is_none_of_the_next_ones(name, args):
    """Awaited, and in a call that blocks."""
    awaits_its_turn(name, args)
    blocks_for_its_turn(name, args)


def blocks_for_its_turn(name, args):
    world, errors = World(lane=True), []
    world._taken, gen = world._turns.taken, world._gen

    def call():
        try:
            getattr(world, name)(*args)
        except LookupError as error:
            errors.append(str(error))

    before = world._turns.take((*message(RECEIVE, None, 0, "cpu"), *COLLECTIVE))
    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: len(world._turns.taken) == 2)
    gen.end()
    before.over()
    thread.join(PATIENCE)
    assert errors == ["this generation broke"]
    assert (gen.steps, world._gen.steps, world._turns.taken) == ([], [], [])


def awaits_its_turn(name, args):
    world = World(lane=True)
    gen = world._gen

    async def main():
        before = world.aio._turns.take((*message(RECEIVE, None, 0, "cpu"), *COLLECTIVE))
        task = asyncio.create_task(getattr(world.aio, name)(*args))
        while len(world.aio._turns.taken) < 2:  # noqa: ASYNC110  (two tasks, one loop)
            await asyncio.sleep(0)
        gen.end()
        before.over()
        await task

    refused(world, gen, [], lambda: awaited(main()))
    assert world.aio._turns.taken == []
