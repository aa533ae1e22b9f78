"""How members wait for each other at the end of their functions (`init_and_run`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from multiworld import settings
from multiworld._c10d.lane import state_meeting
from multiworld.errors import WorldClosedError
from multiworld.launch import groups


@pytest.fixture
def calls(monkeypatch):
    made = []

    def meeting(*_):
        return SimpleNamespace(wait=made.append)

    monkeypatch.setattr(state_meeting, "StateMeeting", meeting)
    return made


class World:
    """What is asked of one; its calls are noted."""

    def __init__(self, calls, size=2, lane="a lane", meets=True, over=False):
        roster = SimpleNamespace(meets=meets)
        resources = None if over else SimpleNamespace(roster=roster)
        self._gen = SimpleNamespace(rank=0, size=size, lane=lane, resources=resources, error=self._error)
        self._calls = calls

    def _error(self):
        return WorldClosedError("w", "world 'w' is over")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def barrier(self):
        self._calls.append("barrier")

    def close(self):
        self._calls.append("close")


def end(world):
    """How `init_and_run` ends."""
    return groups._run_in(world, "result of {}".format, "cfg", (), {})


def test_members_are_waited_for_without_the_worlds_limit(calls):
    assert end(World(calls)) == "result of cfg"
    assert calls == [settings.MAX_TIMEOUT, "barrier", "close"], "what they posted before is over as well"


@pytest.mark.parametrize("why", [{"lane": None}, {"meets": False}, {"size": 1}])
def test_where_members_cannot_the_barrier_waits(calls, why):
    end(World(calls, **why))
    assert calls == ["barrier", "close"]


def test_a_world_that_is_over_is_not_waited_for(calls):
    assert end(World(calls, over=True)) == "result of cfg"
    assert calls == ["close"]
