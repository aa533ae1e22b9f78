"""What a call used is let go with the exception that it raised, without the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
import weakref

import pytest
import torch
from kits.contract.worldkit import SOON

import multiworld as mw
from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld.manager import WorldManager
from multiworld.watchdog import Watchdog


class Used:
    """Something that the caller has in a variable."""


def joined(folder, used):
    mine = Used()
    used.append(weakref.ref(mine))
    mw.join("w", 0, 2, store=f"file://{folder}/store", timeout=0.3)


def awaited(folder, used):
    async def run():
        mine = Used()
        used.append(weakref.ref(mine))
        try:
            await mw.join_async("w", 0, 2, store=f"file://{folder}/store", timeout=0.3)
        except mw.JoinError as error:
            return str(error)  # out of asyncio.run() an exception comes in a circle with its task
        return mine

    assert isinstance(asyncio.run(run()), str)


def initialized(folder, used):
    """As pymultiworld's programs join."""

    async def run():
        mine = Used()
        used.append(weakref.ref(mine))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            try:
                await WorldManager().initialize_world("w", 1, 2, addr="127.0.0.1", port=port, timeout=0.3)
            except mw.JoinError as error:
                return str(error)
        return mine

    assert isinstance(asyncio.run(run()), str)


def attached(folder, used):
    """The members have agreed; one of them does not connect."""
    mine = Used()
    used.append(weakref.ref(mine))
    watchdog = Watchdog()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own, other = watchdog.endpoint("127.0.0.1"), Endpoint(*silent.getsockname())
        members = (Member(0, watchdog.process, own, 1, "host"), Member(1, "f" * 32, other, 2, "host"))
        roster = Roster("w", 1, 0, members, bytes(16), 5.0)
        try:
            watchdog.attach(roster, print, deadline=time.monotonic() + 0.2)
        finally:
            watchdog.release_endpoint(own)


def kept(me, way, folder):
    used = []
    gc.disable()
    with contextlib.suppress(mw.JoinError):
        {"joined": joined, "awaited": awaited, "initialized": initialized, "attached": attached}[way](
            folder, used
        )
    deadline = time.monotonic() + SOON
    while used[0]() is not None:  # a thread of the join may be about to end
        assert time.monotonic() < deadline, gc.get_referrers(used[0]())
        time.sleep(0.01)
    me.emit("free")


@pytest.mark.parametrize("way", ["joined", "awaited", "initialized", "attached"])
def test_a_join_that_fails_lets_go_of_its_caller(cast, way, tmp_path):
    member = cast.start(kept, way=way, folder=str(tmp_path))
    member.expect("free")
    assert member.finish() == 0


def twice(me, size):
    """A receive that torch carries, awaited by two tasks: each has an exception of its own."""
    os.environ["M8D_LANE"] = "0"
    w = mw.join("w", me.rank, size, store=me.store, timeout=30)
    w.barrier()
    if me.rank == 1:
        me.emit("in")
        me.hear(600)  # to be killed
        return

    async def waits(work):
        try:
            await work
        except mw.BrokenWorldException as error:
            return error

    async def run():
        work = await w.aio.irecv(torch.zeros(4), 1)
        tasks = [asyncio.ensure_future(waits(work)) for _ in range(2)]
        me.emit("in")
        return await asyncio.gather(*tasks)

    one, other = asyncio.run(run())
    assert one is not None
    assert one is not other
    w.close()


def test_two_that_await_one_work_have_an_exception_each(cast):
    members = cast.all(twice, 2)
    for each in members:
        each.expect("in")
    members[1].kill()
    assert members[0].finish() == 0
