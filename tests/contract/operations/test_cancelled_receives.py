"""After a cancelled awaited receive the next receive gets its message, whichever way it is posted."""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch.distributed as dist

import multiworld as mw


def cancelled(w, src, *, count=1):
    """Post awaited receives from `src`, and stop waiting for them."""

    async def run():
        tasks = [asyncio.ensure_future(w.aio.recv(torch.zeros(1), src)) for _ in range(count)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(each) for each in asyncio.run(run())] == [asyncio.CancelledError] * count


def by_method(w, t, src):
    return w.recv(t, src)


def by_work(w, t, src):
    work = w.irecv(t, src)
    work.wait()
    return src if src is not None else work._source_rank()


def awaited(w, t, src):
    return asyncio.run(w.aio.recv(t, src))


def bare(w, t, src):
    with w:
        return dist.recv(t, src)


def bare_work(w, t, src):
    with w:
        work = dist.irecv(t, src)
    work.wait()
    return src if src is not None else work.source_rank()


def batched(w, t, src):
    with w:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, src)]):
            work.wait()
    return src


WAYS = {each.__name__: each for each in (by_method, by_work, awaited, bare, bare_work, batched)}


def receiver(me, size, way, first, then, twice):
    w = mw.join("w", me.rank, size, store=me.store, timeout=30, hang_timeout=30)
    cancelled(w, first, count=2)
    if twice:  # a receive that took a message over, and is cancelled, keeps its place
        cancelled(w, then)
    me.emit("posted")
    w.barrier()
    got = []
    for _ in range(4):
        t = torch.zeros(1)
        source = WAYS[way](w, t, then)
        got.append((t.item(), source))
    me.emit("got", got=got)
    w.barrier()
    w.close()


def sender(me, size):
    w = mw.join("w", me.rank, size, store=me.store, timeout=30, hang_timeout=30)
    w.barrier()
    if me.rank == 1:
        for value in range(4):
            w.send(torch.tensor([float(value)]), 0)
    w.barrier()
    w.close()


SOURCES = [(1, 1), (1, None), (None, 1), (None, None)]
CASES = [
    (way, twice, first, then)
    for way, twice in [*((way, False) for way in WAYS), ("by_method", True)]
    for first, then in SOURCES
    if not (way == "batched" and then is None)  # a P2POp names its peer
]


@pytest.mark.parametrize(("way", "twice", "first", "then"), CASES)
def test_messages_keep_their_order(cast, way, first, then, twice):
    members = [
        cast.start(receiver, 0, size=3, way=way, first=first, then=then, twice=twice),
        cast.start(sender, 1, size=3),
        cast.start(sender, 2, size=3),
    ]
    assert members[0].expect("got").got == [(float(value), 1) for value in range(4)]
    assert [each.finish() for each in members] == [0, 0, 0]


def between(me, size):
    """A parked receive from one member holds up no message of another."""
    w = mw.join("w", me.rank, size, store=me.store, timeout=30, hang_timeout=30)
    if me.rank == 0:
        cancelled(w, 1)
        w.barrier()
        t = torch.zeros(1)
        seen = [(w.recv(t), t.item())]
        w.barrier()
        seen += [(w.recv(t), t.item()), (w.recv(t, 1), t.item())]
        me.emit("seen", seen=seen)
    else:
        w.barrier()
        if me.rank == 2:
            w.send(torch.full((1,), 20.0), 0)
        w.barrier()
        if me.rank == 1:
            w.send(torch.full((1,), 10.0), 0)
            w.send(torch.full((1,), 11.0), 0)
    w.barrier()
    w.close()


def test_any_source_takes_what_comes_first(cast):
    members = cast.all(between, 3)
    assert members[0].expect("seen").seen == [(2, 20.0), (1, 10.0), (1, 11.0)]
    assert [each.finish() for each in members] == [0, 0, 0]


def closes_its_loop(me, size):
    """As `loop.close()` without a word to the tasks that are left."""
    w = mw.join("w", me.rank, size, store=me.store, timeout=30, hang_timeout=30)
    if me.rank == 0:
        loop = asyncio.new_event_loop()
        task = loop.create_task(w.aio.recv(torch.zeros(1), 1))
        loop.run_until_complete(asyncio.wait([task], timeout=0.05))
        loop.close()
        del loop, task
        w.barrier()
        got = []
        for _ in range(2):
            t = torch.zeros(1)
            w.recv(t, 1)
            got.append(t.item())
            w.barrier()
        me.emit("got", got=got)
    else:
        w.barrier()
        for value in (1.0, 2.0):
            w.send(torch.tensor([value]), 0)
            w.barrier()
    w.close()


def test_a_loop_that_is_closed_takes_no_message_with_it(cast):
    members = cast.all(closes_its_loop, 2)
    assert members[0].expect("got").got == [1.0, 2.0]
    assert [each.finish() for each in members] == [0, 0]


def goes_on_in_another_loop(me, size):
    """Its task keeps no receive, though it was never told that it is over."""
    w = mw.join("w", me.rank, size, store=me.store, timeout=30, hang_timeout=30)
    if me.rank == 0:

        async def goes_on():
            got = []
            there = asyncio.ensure_future(asyncio.sleep(0.1))
            there.add_done_callback(lambda _: w.send(torch.zeros(1), 1))
            for _ in range(3):
                t = torch.zeros(1)
                await w.aio.recv(t, 1)
                got.append(t.item())
            return got

        loop = asyncio.new_event_loop()
        task = loop.create_task(w.aio.recv(torch.zeros(1), 1))
        loop.run_until_complete(asyncio.wait([task], timeout=0.05))
        loop.close()
        del loop, task
        me.emit("got", got=asyncio.run(goes_on()))
    else:
        w.recv(torch.zeros(1), 0)
        for value in (1.0, 2.0, 3.0):
            w.send(torch.tensor([value]), 0)
    w.barrier()
    w.close()


def test_a_loop_that_is_closed_keeps_no_receive(cast):
    members = cast.all(goes_on_in_another_loop, 2)
    assert members[0].expect("got").got == [1.0, 2.0, 3.0]
    assert [each.finish() for each in members] == [0, 0]
