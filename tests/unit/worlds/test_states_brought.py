"""What each member does where a state is brought: which is ready when, and what stays where the world breaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from multiworld._c10d.lane import state_meeting, state_transfer
from multiworld._join import state as module
from multiworld._join.kept_state import KeptState
from multiworld._join.state import bring_up_to_date
from multiworld.events import WorldReady, bus

BEGAN = 100.0
TRANSFER = 2.0
"""Seconds that a state takes to come."""
PAUSE = 5.0
"""Seconds that the other members still need then."""


class Scene:
    """One member of three; all but the transfer's and the meeting's insides. Member 1 gets rank 0's state.

    Attributes:
        done: what happened, in order.
        ready: the events.
        breaks: what the second meeting raises.
        missing: what the first one raises.
    """

    def __init__(self, monkeypatch, rank, *, meets=True):
        self.done, self.ready, self.breaks, self.missing, self.now = [], [], None, None, BEGAN
        roster = SimpleNamespace(torn=(), meets=meets)
        self.gen = SimpleNamespace(
            world="w", number=2, rank=rank, size=3, lane=object(), state=SimpleNamespace(value="active"),
            resources=SimpleNamespace(steps=(2, 1, 2), roster=roster), fail=self.fail,
        )  # fmt: skip
        state = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: self.done.append("loaded"))
        self.world = SimpleNamespace(
            name="w", _gen=self.gen, _plan=SimpleNamespace(state=state, timeout=1.0),
            _state_is_whole=lambda _: self.done.append("whole"),
            _state_is_torn=lambda: self.done.append("torn"),
        )  # fmt: skip
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(state_meeting, "StateMeeting", lambda *_: SimpleNamespace(wait=self.meet))
        monkeypatch.setattr(state_transfer, "send_state", self.send)
        monkeypatch.setattr(state_transfer, "receive_state", self.receive)

    def meet(self, _):
        if self.missing is not None:
            raise self.missing
        second = "met" in self.done
        self.done.append("met")
        if second:
            self.now += PAUSE
            if self.breaks is not None:
                raise self.breaks

    def send(self, *_, **__):
        self.done.append("sent")
        self.now += TRANSFER

    def receive(self, *_, **__):
        self.done.append("received")
        self.now += TRANSFER
        return {"": {}}

    def fail(self, *_):
        self.gen.state.value = "broken"

    def run(self):
        stop = bus.subscribe(lambda event: self.ready.append(event) if type(event) is WorldReady else None)
        kept = KeptState({"a": None})
        try:
            bring_up_to_date(self.world, kept)
        finally:
            stop()
            self.kept, self.begun = kept.tensors, kept.begun
        return self.done


def test_a_member_that_neither_sends_nor_receives_is_ready_at_once(monkeypatch):
    scene = Scene(monkeypatch, 2)
    assert scene.run() == ["whole", "met", "met", "whole"]
    assert [(each.provider, each.seconds) for each in scene.ready] == [(-1, 0.0)]


def test_the_one_that_sends_is_ready_when_all_are(monkeypatch):
    scene = Scene(monkeypatch, 0)
    assert scene.run() == ["met", "sent", "met", "whole"]
    assert [(each.provider, each.seconds) for each in scene.ready] == [(-1, TRANSFER)]


def test_a_member_s_seconds_end_when_its_own_state_has_come(monkeypatch):
    """Those of others, which it waits for, are none of its transfer's."""
    scene = Scene(monkeypatch, 1)
    assert scene.run() == ["met", "received", "torn", "met", "loaded", "whole", "whole"]
    (event,) = scene.ready
    assert (event.provider, event.seconds, event.at) == (0, TRANSFER, BEGAN + TRANSFER)


def test_a_state_that_has_come_stays_where_the_world_breaks_then(monkeypatch):
    scene = Scene(monkeypatch, 1)
    scene.breaks = ConnectionError("a member was lost")
    with pytest.raises(ConnectionError):
        scene.run()
    assert scene.done[-2:] == ["loaded", "whole"]
    assert scene.gen.state.value == "broken", "the others hear of it"
    assert (scene.kept, scene.ready) == ({}, [])


@pytest.mark.parametrize("rank", range(3))
def test_transfers_have_begun_once_all_members_are_there(monkeypatch, rank):
    scene = Scene(monkeypatch, rank)
    scene.run()
    assert scene.begun
    scene = Scene(monkeypatch, rank)
    scene.missing = ConnectionError("a member did not come")
    with pytest.raises(ConnectionError):
        scene.run()
    assert not scene.begun
    scene = Scene(monkeypatch, rank)
    scene.gen.resources.steps = (2, 2, 2)
    scene.run()
    assert not scene.begun, "each has the state"


@pytest.mark.parametrize(("rank", "does"), [
    (0, ["sent", "whole"]),
    (1, ["received", "torn", "loaded", "whole", "whole"]),
    (2, ["whole", "whole"]),
])  # fmt: skip
def test_none_waits_for_the_others_where_one_cannot(monkeypatch, rank, does):
    assert Scene(monkeypatch, rank, meets=False).run() == does
