"""What an event loop and its operations owe each other: the order of the calls, and turns for the others."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from kits.contract.programkit import number, runs
from kits.contract.waykit import world
from kits.meetkit import until

import multiworld as mw

MANY = 400


def given_up(me, size, order):
    """Three receives, given up in `order`; the next three get the messages as they were sent."""
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)

    async def main():
        tasks = [asyncio.create_task(w.aio.recv(number(), 0)) for _ in order]
        await asyncio.sleep(0.05)
        for which in order:
            tasks[which].cancel()
            await asyncio.wait([tasks[which]])
        w.barrier()
        got = []
        for _ in order:
            await w.aio.recv(t := number(), 0)
            got.append(t.item())
        assert got == sorted(got), f"given up in the order {order}, received {got}"

    if me.rank == 1:
        asyncio.run(main())
    else:
        w.barrier()
        for value in range(len(order)):
            w.send(number(value), 1)
    w.barrier()
    w.close()


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_receives_given_up_in_any_order_are_received_in_the_order_they_were_posted(cast, order):
    runs(cast, given_up, 2, order=order)


def turns(me, size, what):
    """Operations that end at once, and a timer that is always due: it must get its turns."""
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    if me.rank == 1:
        for _ in range(MANY):
            w.recv(number(), 0) if what == "send" else w.broadcast(number(), 0)
        w.close()
        return
    operation = {
        "all_reduce": lambda: w.aio.all_reduce(number(1)),
        "send": lambda: w.aio.send(number(1), 1),
        "broadcast": lambda: w.aio.broadcast(number(1), 0),
    }[what]

    async def main():
        loop = asyncio.get_running_loop()
        ended, seen = itertools.count(), []

        def due():
            seen.append(done)
            loop.call_later(0, due)

        done = 0
        due()
        for done in ended:
            if done == MANY:
                break
            await operation()
        return [later - sooner for sooner, later in itertools.pairwise([*seen, MANY])]

    waited = asyncio.run(main())
    assert max(waited) <= 20, f"a timer that was due waited for {max(waited)} operations of {MANY}"
    w.close()


@pytest.mark.parametrize(("what", "size"), [("all_reduce", 1), ("send", 2), ("broadcast", 2)])
def test_the_loop_gets_its_turns_between_operations_that_end_at_once(cast, what, size):
    """Of gloo; messages; collectives of the lane, whose root does not wait."""
    runs(cast, turns, size, what=what)


GLOO = pytest.mark.parametrize("dtype", ["bool", "complex64"])
"""One that gloo carries, and one of which torch's own function makes numbers that the lane carries."""


def two_sums(me, dtype):
    """A first collective's tensor and a second one's, and the operation; sums are [1, 1, 0] and [0, 0, 1]."""
    values = [me.rank == 0, me.rank == 1, False], [False, False, me.rank == 0]
    tensors = [torch.tensor(each, dtype=getattr(torch, dtype)) for each in values]
    return *tensors, dist.ReduceOp.MAX if dtype == "bool" else dist.ReduceOp.SUM


def before_its_group(me, size, dtype):
    """Rank 0 blocks, and so has one order. Rank 1 awaits, and its loop stands still while gloo's group is made."""
    with world(me, size) as w:
        first, second, op = two_sums(me, dtype)
        objects = [None] * size
        if me.rank == 0:
            work = w.all_reduce(first, op, async_op=True)
            w.all_gather_object(objects, me.rank)
            w.all_reduce(second, op)
            work.wait()
        else:

            async def main():
                calls = [
                    w.aio.all_reduce(first, op),
                    w.aio.all_gather_object(objects, me.rank),
                    w.aio.all_reduce(second, op),
                ]
                tasks = [asyncio.create_task(each) for each in calls]
                await asyncio.sleep(0)
                until(second.any)  # no callback of the loop runs here
                await asyncio.gather(*tasks)

            asyncio.run(main())
        assert (first.tolist(), objects, second.tolist()) == ([1, 1, 0], [0, 1], [0, 0, 1])


@GLOO
def test_nothing_overtakes_a_collective_that_waits_for_its_group(cast, dtype):
    runs(cast, before_its_group, 2, dtype=dtype)


def outlived(me, size, dtype):
    """Rank 0's loop ends at once, and with it the tasks; its program goes on in another."""
    with world(me, size) as w:
        first, second, op = two_sums(me, dtype)
        if me.rank == 1:
            w.all_reduce(first, op)
            w.all_reduce(second, op)
        else:

            async def cut_short():
                task = asyncio.create_task(w.aio.all_reduce(first, op))
                await asyncio.sleep(0)
                assert not task.done()

            async def main():
                await w.aio.all_reduce(second, op)

            asyncio.run(cut_short())
            asyncio.run(main())
            until(first[1].item)
        assert (first.tolist(), second.tolist()) == ([1, 1, 0], [0, 0, 1])


@GLOO
def test_a_collective_that_waits_for_its_group_outlives_its_loop(cast, dtype):
    runs(cast, outlived, 2, dtype=dtype)


# -- beside calls that block -----------------------------------------------------------------------------------


SLOW = list(range(200_000))
"""An object that takes a moment to pickle: what is called meanwhile would come in between."""


def reduced(w, value, way):
    """A sum, by a call that blocks the event loop."""
    tensor = number(value)
    if way == "work":
        w.all_reduce(tensor, async_op=True).wait()
    elif way == "bare":
        with w:
            dist.all_reduce(tensor)
    elif way == "objects":
        found = [None] * w.world_size
        w.all_gather_object(found, value)
        return sum(found)
    else:
        w.all_reduce(tensor)
    return tensor.item()


def during_objects(me, size, way):
    with world(me, size) as w:
        found = [None] * size

        async def main():
            task = asyncio.create_task(w.aio.all_gather_object(found, SLOW if me.rank == 0 else me.rank))
            await asyncio.sleep(0)
            assert not task.done()
            assert reduced(w, 100 + me.rank, way) == 201
            await task

        asyncio.run(main())
        assert found == [SLOW, 1]


@pytest.mark.parametrize("way", ["blocking", "work", "bare", "objects"])
def test_a_call_that_blocks_comes_after_the_objects_called_before_it(cast, way):
    runs(cast, during_objects, 2, way=way)


def during_objects_of_gloo(me, size, way):
    os.environ["M8D_LANE"] = "p2p"
    with world(me, size) as w:
        found, tensor = [None] * size, number(100 + me.rank)

        async def main():
            task = asyncio.create_task(w.aio.all_gather_object(found, SLOW if me.rank == 0 else me.rank))
            await asyncio.sleep(0)
            assert not task.done()
            if way == "elastic_group":
                dist.all_reduce(tensor, group=w.elastic_group)
                assert tensor.item() == 201
            else:
                with w:
                    dist.monitored_barrier(timeout=dt.timedelta(seconds=60))
            await task

        asyncio.run(main())
        assert found == [SLOW, 1]


@pytest.mark.parametrize("way", ["elastic_group", "monitored_barrier"])
def test_what_gloo_carries_comes_after_the_objects_called_before_it(cast, way):
    runs(cast, during_objects_of_gloo, 2, way=way)


def group_first(me, size, way):
    """Both orders are random without turns: in ten worlds one of them is wrong."""
    for turn in range(10):
        with world(me, size, name=f"w{turn}") as w:
            first, second, op = two_sums(me, "bool")

            async def main(w=w, first=first, second=second, op=op):
                task = asyncio.create_task(w.aio.all_reduce(first, op))
                await asyncio.sleep(0)
                if way == "bare":
                    with w:
                        dist.all_reduce(second, op)
                else:
                    w.all_reduce(second, op)
                await task

            asyncio.run(main())
            assert (first.tolist(), second.tolist()) == ([1, 1, 0], [0, 0, 1])


@pytest.mark.parametrize("way", ["blocking", "bare"])
def test_a_call_that_blocks_comes_after_one_that_waits_for_its_group(cast, way):
    runs(cast, group_first, 2, way=way)


def sent_between(me, size, way):
    with world(me, size) as w:
        objects, got = [None], number()

        async def send():
            task = asyncio.create_task(w.aio.send_object_list([SLOW], 1))
            await asyncio.sleep(0)
            if way == "bare":
                with w:
                    dist.send(number(5), 1)
            else:
                w.send(number(5), 1)
            await task

        async def receive():
            task = asyncio.create_task(w.aio.recv_object_list(objects, 0))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="Await that one first"):
                w.recv(got, 0)
            if way == "bare":
                with w, pytest.raises(RuntimeError, match="Await that one first"):
                    dist.recv(got, 0)
            await task
            w.recv(got, 0)

        asyncio.run(receive() if me.rank else send())
        if me.rank:
            assert (objects, got.item()) == ([SLOW], 5)
        w.barrier()


@pytest.mark.parametrize("way", ["blocking", "bare"])
def test_a_message_comes_after_the_objects_called_before_it(cast, way):
    runs(cast, sent_between, 2, way=way)
