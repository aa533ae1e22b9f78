"""A signal's handler closes a world, while the thread that it interrupted holds a lock that the close needs."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.worldkit import PATIENCE, SOON
from kits.meetkit import until

import multiworld as mw
from multiworld._generation import stage
from multiworld.events import Breakage, Cause, State
from multiworld.registry import registry


def interrupt():
    signal.raise_signal(signal.SIGTERM)


def interrupt_in(owner, name):
    """Have the next call of a function interrupted, before it does anything."""
    function = getattr(owner, name)

    def interrupted(*args):
        setattr(owner, name, function)
        interrupt()
        return function(*args)

    setattr(owner, name, interrupted)


def in_a_receive(world):
    """Under the lock of the lane's endpoint."""
    interrupt_in(world._gen._holdings.resources.lane._core, "quiet")
    world.recv(torch.zeros(4), src=1)


def in_a_change_of_state(world):
    """Under the lock of the generation's state."""
    interrupt_in(stage, "step")
    world._gen.verdict(Breakage(Cause.FAILED, (), "a test says so", time.monotonic()))


def in_a_look_at_the_worlds(_):
    """Under the lock of the registry."""
    worlds = registry._worlds

    class Interrupted(dict):
        def items(self):
            registry._worlds = worlds
            interrupt()
            return worlds.items()

    registry._worlds = Interrupted(worlds)
    mw.worlds()


PLACES = {each.__name__: each for each in (in_a_receive, in_a_change_of_state, in_a_look_at_the_worlds)}


def handles(me, size, place):
    world = mw.join("w", me.rank, size, store=me.store, timeout=60)
    if me.rank == 1:
        world.on_break(lambda _: me.emit("broke"))
        world.send(torch.ones(4), dst=0)
        me.hear()
        return

    def handler(*_):
        begun = time.monotonic()
        freed = world.close(1)
        me.emit("handled", freed=freed, seconds=time.monotonic() - begun)

    signal.signal(signal.SIGTERM, handler)
    with contextlib.suppress(mw.MultiworldError):
        PLACES[place](world)
    until(lambda: not mw.worlds())
    me.emit("closed", freed=world.close(PATIENCE), state=str(world.state))
    me.hear()


@pytest.mark.parametrize("place", sorted(PLACES))
def test_a_close_in_a_handler_returns_in_time_and_the_world_is_closed_after_it(cast, place):
    closes, other = cast.all(handles, 2, place=place)
    handled = closes.expect("handled")
    assert not handled.freed
    assert handled.seconds < SOON
    closed = closes.expect("closed")
    assert (closed.freed, closed.state) == (True, str(State.CLOSED))
    other.expect("broke")


def test_a_close_in_a_handler_that_interrupts_no_operation_is_done_when_it_returns():
    world = mw.join("handled", 0, 1, store=dist.HashStore(), timeout=60)
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(world.close(PATIENCE)))
    try:
        interrupt()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [True]
    assert mw.worlds() == {}


def test_a_usual_close_has_no_thread_of_its_own(monkeypatch):
    names, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (names.append(self.name), start(self)))
    with mw.joined("usual", 0, 1, store=dist.HashStore(), timeout=60):
        pass
    world = mw.join("usual", 0, 1, store=dist.HashStore(), timeout=60)
    assert world.close()
    assert not any(name.startswith("m8d-close") for name in names)
