"""How operations of a world end when gloo itself would not end them, or too soon; and what a failed join keeps."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest
import torch
from kits.contract.programkit import number, runs, wait_for
from kits.contract.worldkit import SOON, left_over

import multiworld as mw
from multiworld._c10d.groups import Group
from multiworld._generation import generation
from multiworld._net.stores.rendezvous import Rendezvous
from multiworld.errors import JoinAbandonedError

# -- gloo does not end what is pending ------------------------------------------------------------------------------


def deaf(me, size, lane):
    """gloo is told of nothing: awaited operations end all the same, and with the world's error."""
    os.environ["M8D_LANE"] = lane
    Group.abort = lambda _: None
    w = mw.join("w1", me.rank, size, store=me.store, timeout=300)
    peer = 1 - me.rank

    async def started():
        await (await w.aio.irecv(number(), peer, tag=1))

    async def main():
        me.emit("ready")
        kinds = await asyncio.wait_for(
            asyncio.gather(
                w.aio.recv(number(), peer),
                started(),
                w.aio.send(torch.zeros(64 << 20, dtype=torch.uint8), peer, tag=2),
                w.aio.all_gather([number(), number()], number()),
                return_exceptions=True,
            ),
            PATIENT,
        )
        me.emit("ended", kinds=[type(kind).__name__ for kind in kinds])

    asyncio.run(main())
    me.hear()


PATIENT = 4 * SOON


def quiet(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=300)
    me.emit("ready")
    me.hear()
    w.close()


@pytest.mark.parametrize("lane", ["0", "1"])
def test_awaited_operations_end_though_gloo_tells_nobody(cast, lane):
    kept, lost = cast.start(deaf, 0, size=2, lane=lane), cast.start(quiet, 1, size=2)
    for member in (kept, lost):
        member.expect("ready")
    time.sleep(0.2)  # so that they are pending; sooner is right, too
    lost.stop()  # its kernel goes on answering: gloo sees nothing
    seen = kept.expect("ended", 2 * PATIENT)
    assert seen.kinds == ["BrokenWorldException"] * 4


# -- a member leaves ------------------------------------------------------------------------------------------------


def leaver(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    w.close()


def stayer(me, size):
    """When the group is told of a member that left, counted from the breakage."""
    told, ended = [], threading.Event()
    plain = Group.abort

    def abort(group):
        told.append(time.monotonic())
        plain(group)
        ended.set()

    Group.abort = abort
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    w.on_break(lambda *_: None)
    assert wait_for(lambda: w.state is mw.State.BROKEN)
    assert ended.wait(60)
    me.emit("told", after=told[0] - w.breakage.at, cause=w.breakage.cause.value)
    w.close()


def crasher(me, size):
    mw.join("w1", me.rank, size, store=me.store, timeout=60)
    me.emit("ready")
    me.hear()


def test_what_is_in_flight_has_a_moment_when_a_member_left(cast):
    stays, _ = cast.start(stayer, 0, size=2), cast.start(leaver, 1, size=2)
    seen = stays.expect("told")
    assert seen.cause == "left"
    assert seen.after >= generation.LEFT_GRACE - 0.02
    assert stays.finish() == 0


def test_and_none_when_it_crashed(cast):
    stays, crashes = cast.start(stayer, 0, size=2), cast.start(crasher, 1, size=2)
    crashes.expect("ready")
    crashes.kill()
    seen = stays.expect("told")
    assert seen.cause == "crashed"
    assert seen.after < SOON
    assert stays.finish() == 0


# -- a join fails at its last step ----------------------------------------------------------------------------------


def fails_late(me, size):
    """The group stands, and the last agreement fails on rank 0."""
    w = mw.join("first", me.rank, size, store=me.store, timeout=60)  # loads torch, starts what stays
    w.close()
    before = left_over()
    plain = Rendezvous.commit

    def commit(self, *args, **kwargs):
        if me.rank == 0:
            raise JoinAbandonedError("w1", "a test gives up")
        return plain(self, *args, **kwargs)

    Rendezvous.commit = commit
    with pytest.raises(JoinAbandonedError) as caught:
        mw.join("w1", me.rank, size, store=me.store, timeout=60)
    # The error is kept, and with it all frames that it went through.
    assert wait_for(lambda: all(left_over()[what] <= before[what] for what in ("tasks", "sockets", "fds"))), (
        before,
        left_over(),
    )
    assert caught.value.args
    Rendezvous.commit = plain
    mw.join("w1", me.rank, size, store=me.store, timeout=60).close()


def test_a_join_that_fails_at_its_end_leaves_no_group(cast):
    runs(cast, fails_late, 2)
