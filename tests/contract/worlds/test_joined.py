"""``with mw.joined(...)``: joined, selected and closed with one block, in whatever way it ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from kits.contract.worldkit import PATIENCE
from kits.meetkit import until

import multiworld as mw


def through(me, ends):
    """End the block when both are through the barrier: a member that fails sooner breaks it for the other."""
    me.emit("through")
    me.hear()
    if ends == "raises":
        raise ValueError("mine")


def in_block(me, size, ends):
    kept = None
    try:
        with mw.joined("w1", me.rank, size, store=me.store, timeout=30) as world:
            kept = world
            t = torch.ones(2)
            dist.all_reduce(t)
            assert (t.tolist(), dist.get_world_size()) == ([2.0, 2.0], 2)
            world.barrier()
            through(me, ends)
    except ValueError:
        assert ends == "raises"
    assert kept.state is mw.State.CLOSED
    assert not dist.is_initialized()
    assert mw.worlds() == {}
    me.emit("over")


def awaited(me, size, ends):
    async def run():
        kept = None
        try:
            async with mw.joined("w1", me.rank, size, store=me.store, timeout=30) as world:
                kept = world
                t = torch.ones(2)
                await world.aio.all_reduce(t)
                assert t.tolist() == [2.0, 2.0]
                assert dist.get_world_size() == 2
                await world.aio.barrier()
                through(me, ends)
        except ValueError:
            assert ends == "raises"
        assert kept.state is mw.State.CLOSED
        assert not dist.is_initialized()

    asyncio.run(run())
    assert mw.worlds() == {}
    me.emit("over")


def fails_inside(me, size, *, awaits):
    """Rank 1's block ends with an exception while a message that it has sent is not taken."""
    try:
        if not awaits:
            with mw.joined("w1", me.rank, size, store=me.store, timeout=30) as world:
                fails_or_waits(me, world)
        else:

            async def run():
                async with mw.joined("w1", me.rank, size, store=me.store, timeout=30) as world:
                    fails_or_waits(me, world)

            asyncio.run(run())
    except mw.BrokenWorldException as broken:
        me.emit("broke", cause=broken.cause, detail=broken.detail)
    except LookupError:
        me.emit("over")


def fails_or_waits(me, world):
    world.barrier()
    if me.rank == 1:
        world.send(torch.ones(1), 0, tag=1)
        raise LookupError("mine")
    world.recv(torch.ones(1), 1, tag=2)


def again(me, size):
    """The same object joins once for each block."""
    block = mw.joined("w1", me.rank, size, store=me.store, timeout=30)
    for number in (1, 2):
        with block as world:
            world.barrier()
            assert world.generation >= number
    me.emit("over")


def breaks(me, size):
    try:
        with mw.joined("w1", me.rank, size, store=me.store, timeout=30) as world:
            world.barrier()
            if me.rank == 0:
                dist.recv(torch.ones(1), 1)
    except mw.BrokenWorldException as broken:
        me.emit("broke", cause=broken.cause)
    assert mw.worlds() == {}
    me.emit("over")


def fails(me):
    with pytest.raises(mw.JoinError), mw.joined("w1", 0, 2, store=me.store, timeout=0.5):
        raise AssertionError("the block is not run")
    assert mw.worlds() == {}
    me.emit("over")


def without_threads_of_asyncio(me, *, cancelled):
    """All threads of asyncio's executor are in calls that wait, from the block's end on."""

    async def run():
        seen, ends, bell = [], asyncio.Event(), threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(bell.wait, 10 * PATIENCE))

        async def block():
            async with mw.joined("w1", 0, 1, store=me.store, timeout=30) as world:
                seen.append(world)
                ends.set()

        task = asyncio.create_task(block())
        try:
            if cancelled:
                await ends.wait()
                task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE / 2)
            assert task.done()
            assert task.cancelled() == cancelled
            until(lambda: seen[0].state is mw.State.CLOSED and not mw.worlds())
            me.emit("over")
        finally:
            bell.set()
            await busy

    asyncio.run(run())


@pytest.mark.parametrize("program", [in_block, awaited])
@pytest.mark.parametrize("ends", ["well", "raises"])
def test_a_block_joins_selects_and_closes(program, ends, cast):
    members = cast.all(program, 2, ends=ends)
    for member in members:
        member.expect("through")
    for member in members:
        member.say("go on")
    for member in members:
        member.expect("over")


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_awaited_block_ends_without_a_thread_of_asyncio(cast, cancelled):
    cast.start(without_threads_of_asyncio, cancelled=cancelled).expect("over")


@pytest.mark.parametrize("awaits", [False, True])
def test_an_exception_that_ends_a_block_is_told_with_its_type(cast, awaits):
    members = cast.all(fails_inside, 2, awaits=awaits)
    broke = members[0].expect("broke")
    assert broke.cause == "failed"
    assert broke.detail.endswith("its block ended with LookupError"), broke.detail
    members[1].expect("over")


def test_it_can_be_entered_again_and_joins_anew(cast):
    for member in cast.all(again, 2):
        member.expect("over")


def test_a_world_that_breaks_in_the_block_is_closed_too(cast):
    members = cast.all(breaks, 2)
    assert members[0].expect("broke").cause == "left"
    for member in members:
        member.expect("over")


def test_a_join_that_fails_leaves_nothing(cast):
    cast.start(fails).expect("over")
