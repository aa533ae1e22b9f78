"""Calls that are interrupted as they wait, by a signal's handler or for want of a descriptor: the world goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
import time

import pytest
import torch
from kits.contract.programkit import runs
from kits.contract.waykit import world
from kits.contract.worldkit import PATIENCE
from kits.meetkit import until

import multiworld as mw
from multiworld.errors import BrokenWorldException, MultiworldError

MB = 1 << 20


class OwnError(Exception):
    """The program's."""


@contextlib.contextmanager
def alarm(raised, seconds=0.3):
    """Have a signal's handler raise this in the block, after a while; it has to come out of the block."""

    def handler(*_):
        raise raised

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with pytest.raises(type(raised)) as seen:
        yield
    assert seen.value is raised
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


CALLS = {
    "recv": (lambda w, t: w.recv(t, 1), lambda w, t: w.send(t, 0)),
    "recv of 64 MB": (lambda w, t: w.recv(t, 1), lambda w, t: w.send(t, 0)),
    "send of 64 MB": (lambda w, t: w.send(t, 1), lambda w, t: w.recv(t, 0)),
    "all_reduce": (lambda w, t: w.all_reduce(t), lambda w, t: w.all_reduce(t)),
}


def handled(me, size, name, raised, memory):
    with world(me, size, memory=memory) as w:
        mine, theirs = CALLS[name]
        tensor = torch.ones(16 * MB if "MB" in name else 1)
        w.barrier()
        if me.rank == 0:
            with alarm(raised):
                mine(w, tensor)
            assert w.state is mw.State.ACTIVE
            me.emit("interrupted")
            if "recv" in name:
                w.recv(tensor, 1)
            me.hear()  # this member calls nothing that would drive what was interrupted
            until(lambda: "all_reduce" not in name or tensor.item() == size)
        else:
            me.hear()
            theirs(w, tensor)
            me.emit("over")
        w.barrier()


@pytest.mark.parametrize("memory", [True, False], ids=["from memory", "streamed"])
@pytest.mark.parametrize("raised", [TimeoutError("own"), ConnectionError("own"), OwnError()], ids=repr)
@pytest.mark.parametrize("name", list(CALLS))
def test_what_a_signals_handler_raises_is_the_programs(cast, name, raised, memory):
    """And what was interrupted gets on by itself, where the other members need it."""
    members = cast.all(handled, 2, name=name, raised=raised, memory=memory)
    members[0].expect("interrupted")
    members[1].say("go on")
    members[1].expect("over")
    members[0].say("go on")
    assert [each.finish() for each in members] == [0, 0]


def interrupted_at_its_end(me, size):
    """Rank 0 is interrupted in the moment in which it writes to a connection."""
    w = mw.join("w", me.rank, size, store=me.store, timeout=4 * PATIENCE)
    w.barrier()
    if me.rank == 0:
        sockets = w._gen.lane.endpoint._net.sockets

        class Interrupting:
            def __getattr__(self, name):
                signal.raise_signal(signal.SIGALRM)
                return getattr(sockets[1], name)

        with alarm(OwnError(), seconds=PATIENCE):
            whole, sockets[1] = sockets[1], Interrupting()
            try:
                w.send(torch.ones(1), 1)
            finally:
                sockets[1] = whole
        signal.setitimer(signal.ITIMER_REAL, 0)
        until(lambda: w.state is mw.State.BROKEN)
    else:
        began = time.monotonic()
        with pytest.raises(BrokenWorldException):
            w.recv(torch.ones(1), 0)
        assert time.monotonic() - began < PATIENCE
    me.emit("broken", cause=w.breakage.cause.value, ranks=w.breakage.ranks, detail=w.breakage.detail)
    me.hear()
    w.close()


def test_an_interrupt_that_ends_the_lane_breaks_the_world_on_all_members(cast):
    members = cast.all(interrupted_at_its_end, 2)
    for each in members:
        seen = each.expect("broken")
        assert (seen.cause, tuple(seen.ranks)) == ("failed", (0,)), seen
        assert "the lane was interrupted by OwnError" in seen.detail, seen
    for each in members:
        each.say("close")
    assert [each.finish() for each in members] == [0, 0]


def goes_on_when(cast, told, program, what):
    """Two members run a program; rank 1 goes on when rank 0 tells this."""
    members = cast.all(program, 2, what=what)
    members[0].expect(told)
    members[1].say("go on")
    assert [each.finish() for each in members] == [0, 0]


def refused(*_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def at_the_limit(me, size, what):
    with world(me, size) as w:
        w.barrier()
        if me.rank == 0:
            told = []

            def call():
                try:
                    if what == "posts":
                        told.append(w.irecv(torch.zeros(1), 1, tag=3))
                    else:
                        w.recv(torch.zeros(1), 1, tag=3)
                except MultiworldError as error:
                    told.append(str(error))

            waits = threading.Thread(target=lambda: w.recv(torch.zeros(1), 1))
            if what == "posts":
                waits.start()
                until(lambda: w._gen.lane.endpoint._leader is not None)
            eventfd, os.eventfd = os.eventfd, refused
            calls = threading.Thread(target=call)
            calls.start()
            calls.join()
            os.eventfd = eventfd
            if what == "posts":
                me.emit("posted")
                told[0].wait()
            else:
                assert "descriptor" in told[0], told
                me.emit("posted")
                w.recv(torch.zeros(1), 1, tag=3)
                waits.start()
            waits.join()
        else:
            me.hear()
            for tag in (3, 0):
                w.send(torch.zeros(1), 0, tag=tag)
        w.barrier()


@pytest.mark.parametrize("what", ["posts", "waits"])
def test_a_process_without_a_descriptor_breaks_no_world(cast, what):
    goes_on_when(cast, "posted", at_the_limit, what)


def broken_awaited(me, size, what):
    w = mw.join("w", me.rank, size, store=me.store, timeout=60)
    if me.rank == 1:
        w.barrier()
        me.hear()
        w.close()
        w = mw.join("w", me.rank, size, store=me.store, timeout=60)
        w.send(torch.full((1,), 7.0), 0)
        w.barrier()
        w.close()
        return
    w.barrier()

    async def main():
        ways = {
            "recv_object_list": lambda: w.aio.recv_object_list([None], 1),
            "irecv": lambda: w.aio.irecv(torch.zeros(1), 1),
        }
        before = [asyncio.ensure_future(w.aio.recv_object_list([None], 1))]  # those behind it take turns
        await asyncio.sleep(0.05)
        if what == "irecv":
            before.append(asyncio.ensure_future(ways[what]()))
            await asyncio.sleep(0.05)
        me.emit("waits")
        for each in before:
            with pytest.raises(BrokenWorldException):
                await each
        with pytest.raises(BrokenWorldException):
            await ways[what]()
        await w.rejoin_async(timeout=60)
        tensor = torch.zeros(1)
        await asyncio.wait_for(w.aio.recv(tensor, 1), 30)
        assert tensor.item() == 7

    asyncio.run(main())
    w.barrier()
    w.close()


@pytest.mark.parametrize("what", ["recv_object_list", "irecv"])
def test_awaited_operations_that_a_broken_world_ends_hold_up_none_after_a_rejoin(cast, what):
    goes_on_when(cast, "waits", broken_awaited, what)


def packed(me, size):
    with world(me, size) as w:
        one = torch.zeros(4), torch.ones(4)
        tensor = torch._empty_per_channel_affine_quantized(
            (4, 100), scales=one[1], zero_points=one[0], axis=0, dtype=torch.quint4x2
        )
        for call in (w.send, w.recv):
            with pytest.raises(TypeError, match="share one"):
                call(tensor, 1 - me.rank)
        assert w.state is mw.State.ACTIVE
        w.barrier()


def test_elements_that_share_a_byte_are_refused(cast):
    """torch tells the bytes of 400 elements, of which there are 200: others' memory would be sent."""
    runs(cast, packed, 2)
