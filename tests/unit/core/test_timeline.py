"""Faults and their healing: what begins one, what is a step of it, and what heals it."""

from __future__ import annotations

from multiworld._core import timeline
from multiworld._core.timeline import _MOST_STEPS, LAST, FaultTimeline


def steps(fault):
    return [(each["what"], each["ms"], each["text"]) for each in fault["steps"]]


def test_a_fault_from_the_first_report_to_the_generation_that_heals_it():
    line = FaultTimeline()
    assert line.broke(10.0, "w", 1, "worker 0", "crashed", (2,), "its connection was closed")
    assert not line.broke(10.002, "w", 1, "worker 1", "crashed", (2,), "the same")
    assert not line.broke(10.003, "w", 1, "worker 1", "crashed", (2,), "said twice")
    line.joining(10.1, "w", "worker 2")
    line.active(10.5, "w", 2, "worker 0", whole=False)
    (fault,) = line.faults()
    assert (fault["healed"], fault["ms"]) == (False, None)
    line.active(10.812, "w", 2, "worker 2", whole=True)
    (fault,) = line.faults()
    assert fault["id"] == "w/1/1"
    assert (fault["cause"], fault["ranks"], fault["detail"]) == ("crashed", [2], "its connection was closed")
    assert (fault["healed"], fault["ms"], fault["at"]) == (True, 812.0, 10.0)
    assert steps(fault) == [
        ("seen", 0.0, "worker 0"),
        ("told", 2.0, "worker 1"),
        ("joining", 100.0, "worker 2"),
        ("active", 500.0, "worker 0"),
        ("active", 812.0, "worker 2"),
    ]


def test_what_is_no_fault():
    line = FaultTimeline()
    assert not line.broke(1.0, "w", 1, "a", "left")  # closed in good order
    line.joining(1.0, "w", "a")
    line.active(1.0, "w", 1, "a", whole=True)
    assert line.faults() == []
    assert line.broke(2.0, "w", 2, "a", "hung")
    line.active(2.1, "w", 2, "b", whole=True)  # a late report of the generation that broke
    line.active(2.2, "w", 3, "a", whole=True)
    assert not line.broke(2.3, "w", 2, "c", "hung"), "a late report of a fault that is healed"
    line.joining(2.4, "w", "c")
    (fault,) = line.faults()
    assert fault["ms"] == 200.0
    assert [what for what, *_ in steps(fault)] == ["seen", "active"]


def test_a_world_that_breaks_again_before_it_is_whole_is_healed_of_both():
    line = FaultTimeline()
    assert line.broke(1.0, "w", 1, "a", "crashed")
    assert line.broke(1.5, "other", 1, "a", "crashed")
    assert line.broke(2.0, "w", 2, "a", "hung")
    line.active(3.0, "w", 3, "a", whole=True)
    told = {each["id"]: each["ms"] for each in line.faults()}
    assert told == {"w/1/1": 2000.0, "other/1/2": None, "w/2/3": 1000.0}
    assert [each["id"] for each in line.faults()] == ["w/2/3", "other/1/2", "w/1/1"]


def test_memory_is_bounded():
    line = FaultTimeline()
    for number in range(2 * LAST):
        line.broke(float(number), f"w{number}", 1, "a", "crashed")
    assert len(line.faults()) == LAST
    for _ in range(2 * _MOST_STEPS):
        line.joining(1e6, f"w{2 * LAST - 1}", "a")
    assert len(line.faults()[0]["steps"]) == _MOST_STEPS


def test_a_fault_is_new_once_also_where_more_worlds_break_than_faults_are_kept(monkeypatch):
    worlds = [f"w{number}" for number in range(2 * LAST)]
    line = FaultTimeline()
    assert all(line.broke(1.0, world, 1, "a", "crashed") for world in worlds)
    assert not any(line.broke(1.0, world, 1, who, "crashed") for who in "bc" for world in worlds)
    assert line.broke(2.0, "w0", 2, "a", "hung"), "of the next generation"
    assert not line.broke(2.0, "w0", 1, "d", "crashed")
    line.closed("w1")
    assert line.broke(3.0, "w1", 1, "a", "crashed"), "the world began anew"
    monkeypatch.setattr(timeline, "_MOST_WORLDS", len(worlds))
    assert line.broke(4.0, "more", 1, "a", "crashed")
    assert not line.broke(4.0, "w0", 2, "b", "hung")
    assert line.broke(4.0, "w2", 1, "b", "crashed"), "the one that broke first is forgotten"


def test_calls_that_have_raised_are_a_step_at_their_time_though_told_late():
    line = FaultTimeline()
    line.unblocked(9.0, "w", 1, "a")  # of a fault that was none
    line.broke(10.0, "w", 1, "a", "crashed")
    line.joining(10.1, "w", "a")
    line.active(10.5, "w", 2, "a", whole=True)
    line.unblocked(10.003, "w", 1, "a")
    line.unblocked(9.999, "w", 1, "b")  # of another clock
    line.unblocked(10.6, "w", 1, "c")
    line.unblocked(10.6, "w", 2, "c")
    (fault,) = line.faults()
    assert steps(fault) == [
        ("seen", 0.0, "a"), ("unblocked", 0.0, "b"), ("unblocked", 3.0, "a"), ("joining", 100.0, "a"),
        ("active", 500.0, "a"), ("unblocked", 600.0, "c"),
    ]  # fmt: skip
    assert fault["ms"] == 500.0
    for _ in range(2 * _MOST_STEPS):
        line.unblocked(11.0, "w", 1, "a")
    assert len(line.faults()[0]["steps"]) == _MOST_STEPS


def test_a_world_that_was_closed_begins_anew_under_its_name():
    line = FaultTimeline()
    line.broke(1.0, "w", 3, "a", "crashed")
    line.active(2.0, "w", 4, "a", whole=True)
    line.broke(3.0, "w", 4, "a", "hung")
    line.closed("w")
    line.closed("other")
    line.joining(4.0, "w", "a")
    line.active(5.0, "w", 1, "a", whole=True)
    assert [(each["healed"], each["over"]) for each in line.faults()] == [(False, True), (True, True)]
    assert line.broke(6.0, "w", 1, "a", "crashed"), "the first generation of another world"
    line.active(7.0, "w", 2, "a", whole=True)
    assert [(each["generation"], each["healed"], each["over"], each["ms"]) for each in line.faults()] == [
        (1, True, False, 1000.0), (4, False, True, None), (3, True, True, 1000.0),
    ]  # fmt: skip
