"""What a thread closes as a rule is closed in the caller's where the process gets no other."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from multiworld import background_threads
from multiworld._join.block import Joined, close_async
from multiworld._join.join import _close_late


class World:
    name, closed_in = "w", None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def close(self, _seconds=None):
        self.closed_in = threading.current_thread()


@pytest.fixture
def no_thread(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_thread_of_its_own_as_a_rule():
    world = World()
    asyncio.run(close_async(world))
    assert world.closed_in.name == "m8d-close-w"
    done = threading.Event()
    background_threads.call(done.set, "m8d-close-w")
    assert done.wait(30)


@pytest.mark.usefixtures("no_thread")
def test_a_block_closes_its_world():
    world, joined = World(), Joined(None)
    joined._world = world
    asyncio.run(joined.__aexit__(None, None, None))
    assert world.closed_in is threading.current_thread()


@pytest.mark.usefixtures("no_thread")
def test_a_join_that_was_cancelled_too_late_closes_its_world():
    world = World()
    result = SimpleNamespace(cancelled=lambda: False, exception=lambda: None, result=lambda: world)
    _close_late(result, threading.Lock())
    assert world.closed_in is threading.current_thread()
