"""Awaited operations where the process gets no thread that waits: what has begun goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pytest
import torch
from kits.contract.programkit import runs
from kits.contract.waykit import without_lane, world
from kits.meetkit import until

from multiworld._c10d.waiter_pool import pool


@contextlib.contextmanager
def no_waiter():
    """The pool has no thread, and gets none; yields the names of those that were refused."""
    until(lambda: pool.dismiss() or not pool.threads)
    start, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name.startswith("m8d-waiter"):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse
    try:
        yield refused
    finally:
        threading.Thread.start = start


def received(me, size):
    with world(me, size) as w:
        if me.rank == 1:
            w.send_object_list(["x"], 0)
            w.send(torch.tensor([7.0]), 0)
        else:

            async def main():
                with no_waiter():
                    assert await w.aio.recv_object_list(found := [None], 1) == 1
                assert found == ["x"]
                await w.aio.recv(got := torch.zeros(1), 1)
                assert got.item() == 7

            asyncio.run(main())


def test_a_list_is_received(cast):
    runs(cast, received, 2)


def reduced(me, size, naps):
    """By gloo, which has a future for each; awaited one by one the loop naps, together it does not."""
    os.environ["M8D_LANE"] = "p2p"
    with world(me, size) as w:

        async def main():
            await w.aio.barrier()
            first, second = torch.tensor([1.0]), torch.tensor([10.0])
            with no_waiter() if me.rank == 0 else contextlib.nullcontext():
                if naps:
                    await w.aio.all_reduce(first)
                    await w.aio.all_reduce(second)
                else:
                    await asyncio.gather(w.aio.all_reduce(first), w.aio.all_reduce(second))
            await w.aio.all_reduce(third := torch.tensor([100.0]))
            assert [each.item() for each in (first, second, third)] == [2, 20, 200]

        asyncio.run(main())


def received_by_torch(me, size):
    """Rank 0 gets a thread only after the receive is posted."""
    without_lane()
    with world(me, size) as w:
        w.barrier()  # torch's group is made
        if me.rank == 1:
            me.hear()
            for value in (1.0, 2.0):
                w.send(torch.tensor([value]), 0)
        else:

            async def main():
                first, second = torch.zeros(1), torch.zeros(1)
                with no_waiter() as refused:
                    task = asyncio.create_task(w.aio.recv(first, 1))
                    while not refused and not task.done():  # noqa: ASYNC110  (Thread.start has no event)
                        await asyncio.sleep(0)
                me.emit("refused")
                assert await task == 1
                assert await w.aio.recv(second, 1) == 1
                assert [each.item() for each in (first, second)] == [1, 2]

            asyncio.run(main())


def test_a_receive_of_torchs_is_waited_for_once_there_is_a_thread(cast):
    one, other = cast.all(received_by_torch, 2)
    one.expect("refused")
    other.say("go")
    assert [each.finish() for each in (one, other)] == [0, 0]


@pytest.mark.parametrize("naps", [True, False], ids=["one by one", "together"])
def test_collectives_of_torchs_are_awaited(cast, naps):
    runs(cast, reduced, 2, naps=naps)
