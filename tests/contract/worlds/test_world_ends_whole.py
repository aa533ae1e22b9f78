"""A world's end is carried out whole: where Ctrl-C comes in the middle, and on a host without a thread left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.worldkit import PATIENCE, SOON
from kits.meetkit import until

import multiworld as mw
from multiworld._core.state_machine import Stage
from multiworld._generation.resources import Holdings
from multiworld._net.liveness.attachment import Attachment
from multiworld.events import Breakage, Cause, State
from multiworld.registry import registry


def interrupted_member(me, size):
    world = mw.join("w", me.rank, size, store=me.store, timeout=60)
    if me.rank == 1:
        world.on_break(lambda _: me.emit("broke", cause=str(world.breakage.cause)))
        me.hear()  # receives nothing
        return
    world.send(torch.zeros(4), dst=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Called by a close that waits for the other member to receive.
    world._gen._attachment.ask_to_read = lambda _: os.kill(os.getpid(), signal.SIGINT)
    try:
        world.close(PATIENCE)
    except KeyboardInterrupt:
        me.emit("interrupted", state=str(world.state), worlds=list(mw.worlds()))
    begun = time.monotonic()
    me.emit("closed", freed=world.close(PATIENCE), seconds=time.monotonic() - begun)
    me.hear()


def test_ctrl_c_in_a_close_ends_its_wait_and_leaves_the_world_all_the_same(cast):
    leaver, other = cast.all(interrupted_member, 2)
    there = leaver.expect("interrupted")
    assert (there.state, there.worlds) == (str(State.CLOSED), [])
    closed = leaver.expect("closed")
    assert closed.freed
    assert closed.seconds < SOON
    assert other.expect("broke").cause == str(Cause.LEFT)


@pytest.fixture
def world():
    made = mw.join("whole", 0, 1, store=dist.HashStore(), timeout=60)
    yield made
    made.close()


@pytest.fixture
def refused(monkeypatch):
    """Threads whose names begin so are not to be had, as often as the number says."""
    names, start = {}, threading.Thread.start

    def starting(self):
        for name, left in names.items():
            if self.name.startswith(name) and left:
                names[name] -= 1
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", starting)
    return names


def break_(world, cause):
    world._gen.verdict(Breakage(cause, (), "a test says so", time.monotonic()))


@pytest.mark.parametrize(("owner", "name"), [(Attachment, "leave"), (Holdings, "release")])
def test_ctrl_c_in_the_steps_of_a_close_leaves_nothing_of_it_undone(world, monkeypatch, owner, name):
    function, come = getattr(owner, name), []

    def interrupted(*args, **more):
        if not come:
            come.append(True)
            raise KeyboardInterrupt
        return function(*args, **more)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.close(PATIENCE)
    assert registry.watchdog().snapshot().worlds == ()
    assert world._gen._holdings.freed
    assert mw.worlds() == {}


def test_a_world_is_closed_where_no_thread_is_left_to_destroy_its_group(world, refused):
    refused["m8d-destroy"] = 1
    begun = time.monotonic()
    assert world.close(PATIENCE)
    assert time.monotonic() - begun < SOON
    assert refused == {"m8d-destroy": 0}
    assert mw.worlds() == {}


def test_operations_end_and_all_is_released_where_no_thread_is_left_to_end_them_later(world, refused):
    refused.update({"m8d-abort": 9, "m8d-cut": 9})
    told = threading.Event()
    world.on_break(lambda _: told.set())
    gen = world._gen

    async def awaits():
        future = asyncio.get_running_loop().create_future()
        gen.watch(future)
        break_(world, Cause.LEFT)
        with pytest.raises(mw.BrokenWorldException, match="a test says so"):
            await asyncio.wait_for(future, SOON)

    asyncio.run(awaits())
    assert refused == {"m8d-abort": 8, "m8d-cut": 8}
    assert gen.c10d.gloo.aborted
    assert told.wait(SOON)
    until(lambda: gen.machine.stage is Stage.RETIRED)


def test_functions_given_to_on_break_are_called_when_there_is_a_thread_again(world, refused, caplog):
    refused["m8d-on-break"] = 3
    told = []
    for each in ("first", "second"):
        world.on_break(lambda _, each=each: told.append((each, threading.current_thread().name)))
    break_(world, Cause.FAILED)
    assert world.state is State.BROKEN
    until(lambda: len(told) == 2)
    assert sorted(told) == [("first", "m8d-on-break-whole"), ("second", "m8d-on-break-whole")]
    assert sum("no thread is left" in each for each in caplog.messages) == 2
