"""Every way to send a message in a world, and every way to receive one, under one signature each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import torch.distributed as dist

import multiworld as mw
from multiworld.communicator import WorldCommunicator

TIMEOUT = 60.0  # seconds, of each operation: nothing here takes as long when all is well


@contextlib.contextmanager
def world(me, size, *, name="w", memory=True, timeout=TIMEOUT, hang=TIMEOUT, **options):
    """Join, and leave in good order.

    `memory` False: no member reads another's memory, as where the kernel forbids it.
    """
    if not memory:
        forbid_memory()
    w = mw.join(name, me.rank, size, store=me.store, timeout=timeout, hang_timeout=hang, **options)
    yield w
    w.close()


def until_it_sleeps(w):
    """Wait until an operation of the lane is under way, and the thread that waits for it has slept for some time.

    As it writes, it has the lane's lock: what a signal's handler raises there ends the lane.
    """
    slept, end = 0, time.monotonic() + TIMEOUT
    while slept < 25:
        assert time.monotonic() < end
        under_way = bool(w._gen.operations.log.waiting(time.monotonic()))
        slept = slept + 1 if under_way and w._gen.lane.endpoint._sleeps else 0
        time.sleep(0.002)


def forbid_memory():
    """Make the proof of `multiworld._net.lane.memory` fail in all worlds that this process joins from now on."""
    from multiworld._net.lane import memory

    memory._readv = None


def without_lane():
    """Have this process join its worlds as one that has no lane."""
    os.environ["M8D_LANE"] = "0"


def readers(w):
    """Ranks of the members whose memory this one reads."""
    return sorted(w._gen.lane.endpoint._reading._readers)


def communicator(w):
    made = WorldCommunicator()
    made.set_world(w.name, w)
    return made


# -- sends: (world, tensor, rank of the receiver) ---------------------------------------------------------------------


def method(w, t, dst):
    w.send(t, dst)


def work(w, t, dst):
    w.isend(t, dst).wait()


def batch(w, t, dst):
    with w:
        ops = [dist.P2POp(dist.isend, t, dst)]
    for each in w.batch_isend_irecv(ops):
        each.wait()


def awaited(w, t, dst):
    asyncio.run(w.aio.send(t, dst))


def awaited_work(w, t, dst):
    async def run():
        await (await w.aio.isend(t, dst))

    asyncio.run(run())


def block(w, t, dst):
    with w:
        dist.send(t, dst)


def block_work(w, t, dst):
    with w:
        dist.isend(t, dst).wait()


def block_batch(w, t, dst):
    with w:
        for each in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, dst)]):
            each.wait()


def communicated(w, t, dst):
    asyncio.run(communicator(w).send(t, dst, w.name))


SENDS = {
    each.__name__: each
    for each in (method, work, batch, awaited, awaited_work, block, block_work, block_batch, communicated)
}


# -- receives: (world, tensor, rank of the sender) --------------------------------------------------------------------


def recv_method(w, t, src):
    assert w.recv(t, src) == src


def recv_work(w, t, src):
    w.irecv(t, src).wait()


def recv_batch(w, t, src):
    with w:
        ops = [dist.P2POp(dist.irecv, t, src)]
    for each in w.batch_isend_irecv(ops):
        each.wait()


def recv_awaited(w, t, src):
    assert asyncio.run(w.aio.recv(t, src)) == src


def recv_awaited_work(w, t, src):
    async def run():
        await (await w.aio.irecv(t, src))

    asyncio.run(run())


def recv_block(w, t, src):
    with w:
        assert dist.recv(t, src) == src


def recv_block_work(w, t, src):
    with w:
        dist.irecv(t, src).wait()


def recv_block_batch(w, t, src):
    with w:
        for each in dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, src)]):
            each.wait()


def recv_communicated(w, t, src):
    asyncio.run(communicator(w).recv(t, src, w.name))


def recv_any(w, t, src):
    assert w.recv(t) == src


def recv_block_any(w, t, src):
    with w:
        assert dist.recv(t) == src


def recv_awaited_any(w, t, src):
    assert asyncio.run(w.aio.recv(t)) == src


RECEIVES = {
    each.__name__: each
    for each in (
        recv_method, recv_work, recv_batch, recv_awaited, recv_awaited_work, recv_block, recv_block_work,
        recv_block_batch, recv_communicated, recv_any, recv_block_any, recv_awaited_any,
    )
}  # fmt: skip
