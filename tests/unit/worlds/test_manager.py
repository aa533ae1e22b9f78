"""pymultiworld's manager: what it does with its worlds' names when it closes them."""

from __future__ import annotations

import threading

import pytest

from multiworld import manager as module
from multiworld.events import State
from multiworld.manager import WorldManager
from multiworld.registry import Registry

PATIENCE = 30.0


class FakeWorld:
    """Its close waits for those of all others."""

    def __init__(self, name, together):
        self.name, self.state, self.generation, self.rank = name, State.ACTIVE, 1, 0
        self._gen = self
        self._together = together

    def _close(self, seconds, failure=""):
        self.given = seconds
        self._together.wait(PATIENCE)
        self.state = State.CLOSED

    def close(self):
        self._close(PATIENCE)


@pytest.fixture
def registry(monkeypatch):
    made = Registry()
    monkeypatch.setattr(module, "registry", made)
    return made


def test_cleanup_closes_all_worlds_at_once(registry, monkeypatch):
    monkeypatch.setenv("M8D_CLOSE_TIMEOUT", "20")
    manager, together = WorldManager(), threading.Barrier(4)
    worlds = [FakeWorld(f"w{number}", together) for number in range(4)]
    for world in worlds:
        registry.reserve(world.name)
        registry.settle(world.name, world, 1, 0)
        if world is not worlds[0]:  # that one is not of this manager
            manager.add_world(world.name, "gloo")
            manager._worlds[world.name] = world
            manager.communicator.set_world(world.name, world)
    manager.cleanup()
    assert [world.state for world in worlds] == [State.CLOSED] * 4
    assert [world.given for world in worlds] == [20.0] * 4
    assert manager.communicator.is_broken("w1")
    manager.remove_world("w1")  # another task may not know
    with pytest.raises(ValueError, match="does not exist"):
        manager.remove_world("w0")
