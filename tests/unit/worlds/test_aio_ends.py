"""Awaited operations of a generation that ends: who raises first, their waiter or the generation."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d import waiter_pool  # noqa: E402  (torch may be missing)
from multiworld._generation.fail_awaited import AwaitedOperations  # noqa: E402
from multiworld.aio import Aio, AioWork  # noqa: E402
from multiworld.errors import BrokenWorldException  # noqa: E402
from multiworld.events import State  # noqa: E402
from multiworld.turns import Turns  # noqa: E402
from multiworld.work import WorldWork  # noqa: E402


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
