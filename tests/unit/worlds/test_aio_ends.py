"""Awaited operations of a generation that ends: who raises first, their waiter or the generation."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d import waiter_pool  # noqa: E402  (torch may be missing)
from multiworld._c10d.lane.messages import Messages  # noqa: E402  (torch may be missing)
from multiworld._core.operations.log import OperationLog  # noqa: E402  (torch may be missing)
from multiworld._generation.fail_awaited import AwaitedOperations  # noqa: E402  (torch may be missing)
from multiworld._net.lane.endpoint import Endpoint  # noqa: E402  (torch may be missing)
from multiworld.aio import Aio, AioWork  # noqa: E402  (torch may be missing)
from multiworld.errors import BrokenWorldException  # noqa: E402  (torch may be missing)
from multiworld.events import State  # noqa: E402  (torch may be missing)
from multiworld.turns import RECEIVE, Turns, message  # noqa: E402  (torch may be missing)
from multiworld.work import WorldWork  # noqa: E402  (torch may be missing)


class Work:
    """torch's; its wait raises once it is told to."""

    def __init__(self):
        self.waits, self.over = threading.Event(), threading.Event()

    def wait(self):
        self.waits.set()
        self.over.wait(60)
        raise RuntimeError("it was aborted")


class Generation:
    world, stands, state = "w", True, State.ACTIVE

    def __init__(self):
        self.awaited = AwaitedOperations(self, lambda: BrokenWorldException("w", "by the generation"))
        self.watch = self.awaited.watch

    def explain(self, error):
        return BrokenWorldException("w", "by the waiter") if type(error) is RuntimeError else error

    def told(self):
        pass


@pytest.fixture(autouse=True)
def no_threads():
    yield
    waiter_pool.pool.dismiss()


def started(gen, work):
    """Await `work` in each of the ways in which operations are."""
    aio = Aio(SimpleNamespace(_gen=gen), Turns())
    aio._of = lambda _: SimpleNamespace(irecv=lambda *_: WorldWork(work, gen))
    return {
        "a work": lambda: AioWork(aio, gen, WorldWork(work, gen)).wait(),
        "a collective": lambda: aio._finish(gen, WorldWork(work, gen)),
        "a receive": lambda: aio._recv(gen, None, 0, 0),
    }


@pytest.mark.parametrize("way", ["a work", "a collective", "a receive"])
@pytest.mark.parametrize("nccl", [True, False])
def test_nccls_operations_raise_when_their_waiter_does_and_all_others_by_then(monkeypatch, way, nccl):
    gen, work = Generation(), Work()
    monkeypatch.setattr(waiter_pool._Without, "works", [work] if nccl else [])

    async def main():
        task = asyncio.create_task(started(gen, work)[way]())
        assert await asyncio.to_thread(work.waits.wait, 30)
        gen.state = State.BROKEN
        gen.awaited.fail()
        if nccl:
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done(), "it may still be written into its tensors"
            work.over.set()
        with pytest.raises(BrokenWorldException, match="by the waiter" if nccl else "by the generation"):
            await asyncio.wait_for(task, 30)

    try:
        asyncio.run(main())
    finally:
        work.over.set()


class Refused(BaseException):
    """What a signal's handler raises, or a loop."""


@pytest.mark.parametrize("raised", [OSError("the loop looks at no more"), Refused()], ids=repr)
@pytest.mark.parametrize("in_turn", [False, True])
def test_a_receive_that_cannot_be_awaited_is_taken_back(monkeypatch, raised, in_turn):
    """Its message goes to the next one, and not to a tensor of which the caller knows no more."""
    one, other = socket.socketpair()
    ends = Endpoint({1: one}), Endpoint({0: other})
    mine, theirs = (
        Messages(end, "w", 60.0, lambda error: error, OperationLog(rank, 2)) for rank, end in enumerate(ends)
    )
    gen = Generation()
    gen.lane, gen.rank, gen.size = mine, 0, 2
    turns = Turns()
    aio = Aio(SimpleNamespace(_gen=gen), turns)

    def refused(*_):
        raise raised

    async def receive(tensor):
        if not in_turn:
            return await aio.recv(tensor, 1)
        turn = turns.take(message(RECEIVE, 1, 0, tensor))
        try:
            return await aio._recv_in_turn(gen, turn, tensor, 1)
        finally:
            turn.over()

    async def main():
        first, second = torch.zeros(2), torch.zeros(2)
        with monkeypatch.context() as patch:
            patch.setattr(mine, "until_over", refused)
            with pytest.raises(type(raised)) as seen:
                await receive(first)
        assert seen.value is raised
        theirs.send(torch.ones(2), 0)
        assert await receive(second) == 1
        assert (first.tolist(), second.tolist()) == ([0.0, 0.0], [1.0, 1.0])

    try:
        asyncio.run(main())
    finally:
        for each in ends:
            each.fail(ConnectionError("the test is over"))
