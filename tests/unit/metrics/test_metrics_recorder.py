"""What the events of worlds are counted as."""

from __future__ import annotations

import os

import pytest

from multiworld import events
from multiworld.events import (
    Breakage,
    Cause,
    WorldActive,
    WorldBroken,
    WorldJoining,
    WorldReady,
    WorldStateReceived,
    WorldStuck,
    bus,
)
from multiworld.metrics import recorder as module
from multiworld.metrics.recorder import BROKEN, STATE_BYTES, STUCK, Histogram


def counts(process, name="w", now=1000.0):
    return dict(process.recorder.records(now)[0][name][0])


def test_a_histogram_counts_what_took_no_longer_than_each_bound():
    seen = Histogram((0.5, 1.0))
    for seconds in (0.1, 0.5, 0.7, 9.0):
        seen.observe(seconds)
    assert seen.cumulative() == [("0.5", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert seen.sum == pytest.approx(10.3)


def test_joins_by_what_came_of_them_and_how_long_they_took(process):
    process.joins("w", took=0.3)
    process.recorder.apply(WorldActive("w", 2, 0, 110.0, 4))  # at an advance
    process.recorder.apply(WorldJoining("w", 0, 0, 120.0))
    process.fails("w")
    process.recorder.apply(WorldActive("w", 3, 0, 130.0, 4))
    assert counts(process) == {("joins", "active"): 1, ("joins", "advanced"): 2, ("joins", "failed"): 1}
    assert process.recorder.joins.sum == pytest.approx(0.3), (
        "one that failed has no duration, nor has an advance"
    )


def test_a_breakage_lasts_until_the_world_is_active(process):
    recorder = process.recorder
    process.joins("w")
    process.breaks("w", Cause.HUNG, at=200.0)
    assert recorder.records(203.0)[0]["w"][1] == 200.0
    assert counts(process, now=203.0)[BROKEN] == 3.0
    assert counts(process, now=204.0)[BROKEN] == 4.0
    process.joins("w", took=1.0, at=205.0)
    assert counts(process)[BROKEN] == 6.0, "the join is a part of it"
    assert recorder.records(300.0)[0]["w"][1] is None
    assert recorder.recoveries.sum == pytest.approx(6.0)
    process.breaks("w", Cause.CRASHED, at=300.0)
    process.known["w"] = object()
    process.fails("w", at=301.0)
    assert recorder.records(302.0)[0]["w"][1] == 300.0, "a join that failed repairs nothing"
    process.closes("w", at=302.0)
    assert counts(process)[BROKEN] == 8.0
    assert recorder.records(303.0)[0]["w"][1] is None
    assert recorder.recoveries.cumulative()[-1] == ("+Inf", 1.0), "a world that was closed has not recovered"
    found = counts(process)
    assert (found["breakages", "hung"], found["breakages", "crashed"]) == (1, 1)


def test_a_world_that_a_member_left_in_good_order_is_not_broken(process):
    """That member may be done: a hub keeps the world, and its Rejoiner tries, for as long as the program runs."""
    recorder = process.recorder
    process.joins("w")
    process.breaks("w", Cause.LEFT, at=200.0)
    assert recorder.records(300.0)[0]["w"][1] is None
    process.joins("w", at=300.0)
    assert counts(process) == {("joins", "active"): 2, ("breakages", "left"): 1}
    assert recorder.recoveries.cumulative()[-1] == ("+Inf", 0.0)
    process.add("before").breaks(Cause.LEFT)
    recorder.end()
    recorder.begin()
    assert recorder.records(300.0)[0]["before"][1] is None


def test_bytes_of_a_state_count_once(process):
    def came(provider, received, generation=1):
        process.recorder.apply(WorldStateReceived("w", generation, 0, 1.0, provider, received, 100))

    for received in (10, 40, 100, 100):
        came(1, received)
    assert counts(process)[STATE_BYTES] == 100
    came(2, 30)  # another provider
    came(2, 20)
    came(2, 25)
    assert counts(process)[STATE_BYTES] == 135
    came(2, 50, generation=2)
    assert counts(process)[STATE_BYTES] == 185


def test_only_a_state_that_came_from_another_took_time(process):
    process.recorder.apply(WorldReady("w", 1, 0, 1.0, -1, 5.0))
    assert process.recorder.transfers.cumulative()[-1][1] == 0
    process.recorder.apply(WorldReady("w", 1, 0, 1.0, 0, 2.0))
    assert (process.recorder.transfers.sum, process.recorder.transfers.cumulative()[-1][1]) == (2.0, 1.0)


def test_operations_that_are_stuck(process):
    process.recorder.apply(WorldStuck("w", 1, 0, 1.0, None))
    assert counts(process) == {STUCK: 1}


def test_nothing_is_subscribed_before_it_begins_and_once_after(process):
    before = len(bus._subscribers)
    world = process.add("w")
    world.breaks(ago=3.0)
    process.names = ("joining",)
    bus.publish(WorldBroken("w", 1, 0, 1.0, Breakage(Cause.CRASHED, (), "", 1.0)))
    process.recorder.begin()
    process.recorder.begin()
    assert len(bus._subscribers) == before + 1
    found = process.recorder.records(world.breakage.at + 3)[0]
    assert found == {"joining": ({}, None), "w": ({BROKEN: 3.0}, world.breakage.at)}
    bus.publish(WorldActive("joining", 1, 0, 50.0, 2))
    assert counts(process, "joining") == {("joins", "active"): 1}
    assert process.recorder.joins.sum == 0, "its begin was not seen"
    process.recorder.end()
    assert len(bus._subscribers) == before
    assert process.recorder.records(1.0) == ({}, {})


def test_worlds_that_were_closed_long_ago_are_forgotten_and_stay_in_the_sum(process, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    for name in ("a", "b", "c", "open"):
        process.joins(name)
    process.fails("never")  # a first join that failed leaves nothing to close
    for name in ("a", "b"):
        process.closes(name)
    process.joins("a")
    process.closes("c")
    found, forgotten = process.recorder.records(1.0)
    assert list(found) == ["open", "a", "b", "c"]
    assert forgotten == {("joins", "failed"): 1}
    process.closes("a")
    found, forgotten = process.recorder.records(1.0)
    assert list(found) == ["open", "c", "a"]
    assert forgotten == {("joins", "failed"): 1, ("joins", "active"): 1}
    assert found["a"][0] == {("joins", "active"): 2}


def test_a_forked_child_begins_at_nothing():
    recorder = module.recorder
    recorder.begin()
    try:
        bus.publish(WorldActive("forked", 1, 0, 1.0, 2))
        assert "forked" in recorder.records(1.0)[0]
        pid = os.fork()
        if not pid:
            found = recorder.records(1.0)
            bus.publish(WorldActive("childs", 1, 0, 1.0, 2))
            os._exit(found != ({}, {}) or list(recorder.records(1.0)[0]) != ["childs"])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        recorder.end()


def test_every_kind_of_event_is_known_to_it():
    """A new one is to be counted, or left out on purpose."""
    left_out = {
        events.Event,
        events.MemberBusy,  # `World.busy` says it
        events.WorldUnblocked,  # a step of the page's timeline
    }
    kinds = {
        kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)
    }
    assert kinds - left_out <= {each for each in vars(module).values() if isinstance(each, type)}
