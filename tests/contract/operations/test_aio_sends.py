"""Awaited messages: their values, a receiver that is late, and an error that is kept."""

from __future__ import annotations

import asyncio
import threading

import torch

import multiworld as mw

SIZES = (0, 1, 3, 1000, 1 << 16)  # elements
LARGE = 1 << 20  # elements of a message that waits for its receiver
WITHIN = 30.0


def echo(me, size):
    """Rank 1 sends back what it gets; both await. Then rank 0 sends what is not received for a while."""
    world = mw.join("w", me.rank, size, store=me.store, timeout=60)
    peer = 1 - me.rank
    for count in SIZES:
        out = torch.arange(count, dtype=torch.float64)
        into = torch.full((count,), -1.0, dtype=torch.float64)

        async def main(out=out, into=into):
            for i in range(100):
                if me.rank == 0:
                    await world.aio.send(out + i, peer)
                    await world.aio.recv(into, peer)
                    assert torch.equal(into, out + i)
                else:
                    await world.aio.recv(into, peer)
                    await world.aio.send(into, peer)

        asyncio.run(main())
    me.emit("echoed", threads=[each.name for each in threading.enumerate()])
    asyncio.run(patient(me, world))
    kept = asyncio.run(refused(world, peer))
    world.barrier()
    me.emit("closed", all=world.close(), kept=type(kept).__name__)


async def refused(world, peer):
    """An error of posting, kept with its traceback."""
    try:
        await world.aio.send(torch.ones(4).to_sparse(), peer)
    except (RuntimeError, ValueError) as exc:
        return exc


async def patient(me, world):
    """The other one receives when it is told to; until then this loop has its turns."""
    if me.rank == 1:
        await asyncio.to_thread(me.hear)
        into = torch.zeros(LARGE)
        for i in range(3):
            await world.aio.recv(into, 0)
            assert into[0] == into[-1] == i
        return
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    counting = asyncio.create_task(count())
    sends = [asyncio.create_task(world.aio.send(torch.full((LARGE,), float(i)), 1)) for i in range(3)]
    await asyncio.wait(sends, timeout=1.0)
    me.emit("waiting", turns=turns, done=[each.done() for each in sends])
    await asyncio.wait_for(asyncio.gather(*sends), WITHIN)
    counting.cancel()


def test_values_are_right_and_awaiting_needs_no_thread(cast):
    members = cast.all(echo, 2)
    for member in members:
        told = member.expect("echoed")
        assert not [name for name in told.threads if name.startswith(("m8d-waiter", "m8d-lane"))]
    told = members[0].expect("waiting")
    assert told.done == [False] * 3
    assert told.turns > 20
    members[1].say("receive")
    for member in members:
        told = member.expect("closed")
        assert told.kept != "NoneType"
        assert told.all, "the error keeps nothing of the world"
    assert [member.finish() for member in members] == [0, 0]
