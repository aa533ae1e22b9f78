"""The page's views: what a process and a run show of their worlds."""

from __future__ import annotations

import pytest
from kits.runstatekit import AT, begun, run_of
from unit.web.webkit import STATUS

from multiworld._core.timeline import FaultTimeline
from multiworld.events import (
    Breakage,
    Cause,
    MemberBusy,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
    WorldReady,
    WorldStateReceived,
    WorldStuck,
    WorldUnblocked,
)
from multiworld.pending import PendingOperation
from multiworld.run import events as h
from multiworld.run.control.pending import ASK_AFTER, waiting_worlds
from multiworld.run.view.state import RunState
from multiworld.web.faults import merged
from multiworld.web.links import Links
from multiworld.web.process_view import LAST, EventTrack, view_of_process
from multiworld.web.run_view import RunViews

PENDING = [{
    "text": "all_reduce #2: rank 0 waits since 3.0 s", "kind": "all_reduce", "number": 2, "size": 4, "peer": None,
    "tag": None, "since": 97.0, "waiting": [0], "missing": {"1": "is in no operation of this world"}, "idle": False,
}]  # fmt: skip
WAITS = {"pending": PENDING, "waited": {"0": 0.0, "1": 3.0}}
BREAKAGE = Breakage(Cause.CRASHED, (1,), "its connection was closed by its kernel", 5.0)
BROKEN = {
    **STATUS,
    "state": "broken",
    "cause": "crashed",
    "ranks": [1],
    "detail": BREAKAGE.detail,
    "broke": 105.0,
}


def status(*worlds):
    return {"pid": 10, "host": "alpha", "now": 200.0, "worlds": list(worlds)}


def tracked(*events):
    track = EventTrack(lambda: 100.0)
    for each in events:
        track.apply(each)
    return track


def process_views():
    healed = tracked(
        WorldJoining("w0", 0, 0, 1.0),
        WorldActive("w0", 1, 0, 2.0, 2),
        WorldBroken("w0", 1, 0, 5.0, BREAKAGE),
        WorldJoining("w0", 0, 0, 5.1),
        WorldActive("w0", 2, 0, 5.5, 2),
        WorldStateReceived("w0", 2, 0, 5.6, 1, 10, 100),
    )
    joining = {"name": "w1", "state": "joining"}
    return [
        view_of_process(status(STATUS, joining), healed, {"w0": WAITS}, Links()),
        view_of_process(status(BROKEN), tracked(WorldBroken("w0", 1, 0, 5.0, BREAKAGE)), {}, Links()),
        view_of_process(status({**STATUS, "busy": [1], "sizes": "2:4"}), tracked(), {}, Links()),
    ]


def run_views():
    return [
        RunViews().view(snapshot(), (), {0: hub()}, {"w0": WAITS}),
        RunViews().view(snapshot(), (), {}, {}, "a note"),
    ]


def test_a_process_shows_its_worlds_members_and_what_waits():
    found, broken, busy = process_views()
    world, joining = found["worlds"]
    assert [each["process"] for each in world["members"]] == ["alpha/10", "beta/11"]
    assert [each["state"] for each in world["members"]] == ["active", "active"]
    assert [(each["received"], each["total"]) for each in world["members"]] == [(10, 100), (0, 0)]
    assert (world["pending"], world["waited"]) == (PENDING, WAITS["waited"])
    assert (joining["state"], joining["members"]) == ("joining", [])
    (fault,) = found["faults"]
    assert [each["what"] for each in fault["steps"]] == ["seen", "joining", "active"]
    assert (fault["at"], fault["ms"], fault["ranks"]) == (105.0, 500.0, [1])
    (world,) = broken["worlds"]
    assert (world["cause"], world["detail"], world["pending"]) == ("crashed", BREAKAGE.detail, [])
    assert [(each["state"], each["cause"], each["evidence"]) for each in world["members"]] == [
        ("broken", "", ""),
        ("lost", "crashed", BREAKAGE.detail),
    ]
    (world,) = busy["worlds"]
    assert [each["state"] for each in world["members"]] == ["active", "busy"]
    assert world["members"][1]["evidence"] == "runs, but does not answer"


def test_every_event_has_a_line():
    operation = PendingOperation("barrier", 3, 0, (0, 1), None, None, {0: 10.0}, {1: "is not there"})
    left = Breakage(Cause.LEFT, (1,), "it closed", 5.0)
    events = [
        WorldJoining("w", 0, 0, 1.0),
        WorldActive("w", 1, 0, 1.0, 3),
        WorldJoinFailed("w", 0, 0, 1.0, ValueError("no store")),
        WorldBroken("w", 1, 0, 1.0, BREAKAGE),
        WorldBroken("w", 1, 0, 1.0, left),
        WorldReady("w", 1, 0, 1.0, -1, 0.0),
        WorldReady("w", 1, 0, 1.0, 2, 1.5),
        MemberBusy("w", 1, 0, 1.0, (1,), busy=True),
        MemberBusy("w", 1, 0, 1.0, (1,), busy=False),
        WorldStuck("w", 1, 0, 1.0, operation),
        WorldUnblocked("w", 1, 0, 1.0, 2, 0.0015),
        WorldClosed("w", 1, 0, 1.0),
    ]
    told, faults, _ = tracked(*events).told()
    assert [(each["id"], each["level"], each["text"]) for each in told] == [
        (1, "info", "w joining"),
        (2, "info", "w active, generation 1, 3 members"),
        (3, "warning", "w not joined: no store"),
        (4, "warning", f"w broken, generation 1: crashed, ranks [1]: {BREAKAGE.detail}"),
        (5, "info", "w broken, generation 1: left, ranks [1]: it closed"),
        (6, "info", "w ready: its state, this member had it"),
        (7, "info", "w ready: its state, from rank 2 in 1.50 s"),
        (8, "warning", "w: ranks [1] run and do not answer"),
        (9, "info", "w: ranks [1] answer again"),
        (10, "warning", "w: barrier #3: rank 0 waits since 10.0 s; rank 1 is not there"),
        (11, "info", "w, generation 1: 2 blocked calls raised within 1.5 ms"),
        (12, "info", "w closed"),
    ]
    assert {each["at"] for each in told} == {101.0}
    assert len(faults) == 1
    assert len(tracked(*events * LAST).told()[0]) == LAST


def test_state_that_has_come_or_was_for_a_broken_world_is_not_shown():
    part = WorldStateReceived("w0", 2, 0, 5.6, 1, 10, 100)
    assert tracked(part).told()[2] == {"w0": (10, 100)}
    for over in (WorldStateReceived("w0", 2, 0, 5.7, 1, 100, 100), WorldBroken("w0", 2, 0, 5.7, BREAKAGE)):
        assert tracked(part, over).told()[2].get("w0", (0, 0)) == (0, 0)


# -- a run


def snapshot(*more):
    """A hub (rank 0, pid 4000) and two workers (pids 4001 and 4002) with a world each: w0, w1."""
    return run_of(*begun(2), *more).snapshot()


def hub(**more):
    """What the hub says of its worlds."""
    worlds = [
        {
            **STATUS, "name": f"w{i}", "generation": 1, "rank": 1,
            "members": [[0, 4001 + i, "alpha", ""], [1, 4000, "alpha", ""]], **more,
        }
        for i in range(2)
    ]  # fmt: skip
    return {"pid": 4000, "host": "alpha", "now": 200.0, "worlds": worlds}


def members(view, name):
    (found,) = [each for each in view["worlds"] if each["name"] == name]
    return [(each["rank"], each["worker"], each["state"]) for each in found["members"]]


@pytest.mark.parametrize("first", [True, False])
def test_a_worker_that_is_gone_on_one_node_and_active_on_another_is_active(first):
    """A node that was cut off has lost the rank, and its process, to another one."""
    here = snapshot()
    gone = {**snapshot(h.WorkerFailed(AT + 9, 1, 4001, 0, -9, "killed by SIGKILL")), "node": "beta"}
    found = RunViews().view(*((here, [gone]) if first else (gone, [here])), {}, {})
    assert [each["state"] for each in found["worlds"]] == ["active", "active"]


def test_a_run_shows_members_by_their_rank_in_the_world():
    found = RunViews().view(snapshot(), (), {0: hub()}, {"w0": WAITS})
    assert members(found, "w0") == [(0, 1, "active"), (1, 0, "active")]
    assert members(found, "w1") == [(0, 2, "active"), (1, 0, "active")]
    assert found["worlds"][0]["pending"] == PENDING
    assert found["worlds"][0]["size"] == 2
    assert [(each["rank"], each["role"], each["state"]) for each in found["processes"]] == [
        (0, "hub:0", "up"), (1, "worker:0", "up"), (2, "worker:1", "up"),
    ]  # fmt: skip
    assert found["run"]["run_id"] == snapshot()["run_id"]


def test_without_an_answer_of_the_workers_ranks_in_the_world_are_not_known():
    found = RunViews().view(snapshot(), (), {}, {}, "workers do not answer")
    assert members(found, "w0") == [(-1, 0, "active"), (-1, 1, "active")]
    assert found["note"] == "workers do not answer"


def test_a_killed_member_keeps_its_rank_while_it_comes_back():
    views = RunViews()
    views.view(snapshot(), (), {0: hub()}, {})
    killed = [
        h.WorkerFailed(AT + 100, 1, 4001, 0, -9, "killed by SIGKILL"),
        h.WorldChanged(AT + 100.01, 0, "w0", "broken", 1, BREAKAGE.detail, "crashed", ranks=(0,)),
    ]
    broken = {key: BROKEN[key] for key in ("state", "cause", "detail")} | {"ranks": [0]}
    told = hub()
    told["worlds"][0] |= broken
    found = views.view(snapshot(*killed), (), {0: told}, {"w0": WAITS})
    assert members(found, "w0") == [(0, 1, "gone"), (1, 0, "broken")]
    world = found["worlds"][0]
    assert (world["state"], world["cause"], world["detail"]) == ("broken", "crashed", BREAKAGE.detail)
    assert world["members"][0]["cause"] == "crashed"
    assert world["pending"] == []
    again = [
        h.WorkerRestarting(AT + 100.02, 1, 1, 0.0, 2),
        h.WorkerStarted(AT + 100.1, 1, "worker", 0, 1, 5001, 1),
        h.WorldChanged(AT + 101, 1, "w0", "joining", 0),
    ]
    found = views.view(snapshot(*killed, *again), (), {0: told}, {})
    assert members(found, "w0") == [(0, 1, "joining"), (1, 0, "broken")]
    assert found["worlds"][0]["members"][0]["process"] == "alpha/5001"
    back = [
        h.WorldChanged(AT + 101.5, 1, "w0", "active", 2),
        h.WorldChanged(AT + 101.5, 0, "w0", "active", 2),
    ]
    found = views.view(snapshot(*killed, *again, *back), (), {}, {})
    assert members(found, "w0") == [(0, 1, "active"), (1, 0, "active")]
    (fault,) = found["faults"]
    assert (fault["cause"], fault["ranks"], fault["healed"]) == ("crashed", [0], True)
    assert fault["ms"] == pytest.approx(1490, abs=1)
    assert found["totals"] == {"failures": 1, "restarts": 1, "nodes_lost": 0, "broken": {"crashed": 1}}


def test_members_on_other_nodes_are_shown_by_what_others_say_of_them():
    told = hub()
    told["worlds"][0] = {
        **told["worlds"][0], "size": 3, "busy": [2],
        "members": [*told["worlds"][0]["members"], [2, 77, "beta", ""]],
    }  # fmt: skip
    found = RunViews().view(snapshot(), (), {0: told}, {})
    assert members(found, "w0") == [(0, 1, "active"), (1, 0, "active"), (2, None, "busy")]


def test_the_newest_generation_that_a_worker_knows_counts():
    old, new = hub(generation=1), hub(generation=2)
    new["worlds"] = [{**each, "rank": 0, "backend": "nccl"} for each in new["worlds"]]
    for order in ({0: old, 1: new}, {1: new, 0: old}):
        assert RunViews().view(snapshot(), (), order, {})["worlds"][0]["backend"] == "nccl"


def test_members_that_were_told_once_are_known():
    views = RunViews()
    views.view(snapshot(), (), {0: hub()}, {})
    later = hub(members=[], busy=[0])
    found = views.view(snapshot(), (), {0: later}, {})
    assert members(found, "w0") == [(0, 1, "busy"), (1, 0, "active")]
    assert found["worlds"][0]["backend"] == "gloo"


def test_what_the_others_say_counts_though_one_is_silent():
    found = RunViews().view(snapshot(), (), {0: hub(busy=[0])}, {})
    assert members(found, "w0")[0] == (0, 1, "busy")


def test_a_world_that_begins_anew_shows_none_of_the_ranks_it_had():
    views = RunViews()
    views.view(snapshot(), (), {0: hub(generation=3)}, {})
    more = [h.WorkerStarted(AT + 1, each, "worker", each, each, 5000 + each, 1) for each in range(3)]
    more += [h.WorldChanged(AT + 2, each, "w0", "active", 1) for each in range(2)]
    again = {**hub(members=[], rank=0), "pid": 5000}
    found = views.view(snapshot(*more), (), {0: again}, {})
    assert members(found, "w0") == [(0, 0, "active"), (-1, 1, "active")]
    assert views.rosters.lacking({0: again}) == {"0": ["w0", "w1"]}


def test_worlds_that_are_gone_leave_nothing():
    views = RunViews()
    views.view(snapshot(), (), {0: hub()}, {})
    views.view({**snapshot(), "worlds": []}, (), {}, {})
    assert (views._rows, views.rosters._known, views._links._kept) == ({}, {}, {})
    track = tracked(WorldStateReceived("w0", 2, 0, 5.6, 1, 10, 100), WorldClosed("w0", 2, 0, 6.0))
    assert track._transfers == {}


def test_processes_of_two_containers_of_one_name_are_two():
    other = launcher("alpha", h.WorkerStarted(AT, 7, "worker", 0, 0, 4000, 0))
    found = RunViews().view(snapshot(), (other,), {}, {})
    assert [each["id"] for each in found["processes"]] == [
        "alpha/4000",
        "alpha/4001",
        "alpha/4002",
        "alpha/4000#7",
    ]


def test_faults_keep_their_ids_when_another_launcher_answers_or_does_not():
    views = RunViews()
    gone = h.WorldChanged(AT + 5, 0, "w0", "broken", 1, "why", "crashed", ranks=(0,))
    alone = views.view(alpha(gone), (), {}, {})["faults"]
    both = views.view(
        alpha(gone), (beta(h.WorldChanged(AT + 5.1, 1, "w0", "broken", 1, "why", "crashed")),), {}, {}
    )
    assert [each["id"] for each in alone] == [each["id"] for each in both["faults"]] == ["w0/1"]


@pytest.mark.parametrize("healed", [True, False])
def test_a_fault_is_none_of_an_earlier_world_of_that_name(healed):
    here, there = FaultTimeline(), FaultTimeline()
    for each, who in ((here, "rank 0"), (there, "rank 1")):
        each.broke(AT, "w0", 1, who, "crashed", (2,))
        if healed:
            each.active(AT + 1, "w0", 2, who, whole=True)
    (old,) = merged([here.faults(), there.faults()])
    assert (len(old["steps"]), old["healed"]) == (4 if healed else 2, healed)
    here.closed("w0")
    there.closed("w0")
    here.broke(AT + 7200, "w0", 1, "rank 0", "hung", (0,))
    (new,) = merged([here.faults(), there.faults()])
    assert (new["id"], new["at"], new["cause"], new["healed"]) == ("w0/1", AT + 7200, "hung", False)
    assert [each["ms"] for each in new["steps"]] == [0.0]
    there.broke(AT + 7200.5, "w0", 1, "rank 1", "hung", (0,))
    (new,) = merged([here.faults(), there.faults()])
    assert [(each["what"], each["ms"]) for each in new["steps"]] == [("seen", 0.0), ("told", 500.0)]


def test_a_node_may_see_a_fault_when_it_is_healed_for_another_one():
    here, late = FaultTimeline(), FaultTimeline()
    here.broke(AT, "w0", 1, "rank 0", "unreachable", (1,))
    here.active(AT + 1, "w0", 2, "rank 0", whole=True)
    late.broke(AT + 12, "w0", 1, "rank 1", "unreachable", (0,))
    (fault,) = merged([here.faults(), late.faults()])
    assert (len(fault["steps"]), fault["at"]) == (3, AT)


def broken_by_one(state, worlds, members):
    state.apply(h.WorkerFailed(AT + 100, 0, 4000, 0, -9, "killed by SIGKILL"))
    for rank in range(1, members):
        for number in range(worlds):
            state.apply(
                h.WorldChanged(AT + 100, rank, f"w{number}", "broken", 1, "rank 0 crashed", "crashed")
            )


def test_all_events_of_a_fault_of_many_worlds_are_shown_its_cause_first():
    state, views = run_of(*begun(7)), RunViews()
    before = state.snapshot(after=0)
    shown = len(views.view(before, (), {}, {})["events"])
    broken_by_one(state, 32, 8)
    found = views.view(state.snapshot(after=views.seen(before)), (), {}, {})["events"][shown:]
    assert len(found) == 1 + 7 * 32
    assert found[0]["text"] == "rank 0 (hub:0) failed: killed by SIGKILL"


def test_events_that_are_not_shown_are_counted():
    state, views = run_of(*begun(7)), RunViews()
    before = state.snapshot(after=0)
    shown = len(views.view(before, (), {}, {})["events"])
    broken_by_one(state, 4, 8)
    found = views.view(state.snapshot(), (), {}, {})["events"][shown:]
    assert found[0]["text"] == "9 events are not shown: more came than are kept"
    assert (found[0]["level"], len(found)) == ("warning", 21)
    assert len({each["id"] for each in found}) == 21


def test_events_are_told_once():
    views = RunViews()
    first = views.view(snapshot(), (), {}, {})["events"]
    again = views.view(snapshot(), (), {}, {})["events"]
    assert [each["id"] for each in first] == [each["id"] for each in again]
    failed = h.WorkerFailed(AT + 100, 1, 4001, 0, -9, "killed by SIGKILL")
    last = views.view(snapshot(failed), (), {}, {})["events"]
    assert last[: len(first)] == first
    assert [(each["level"], each["text"]) for each in last[len(first) :]] == [
        ("warning", "rank 1 (worker:0) failed: killed by SIGKILL")
    ]


def test_one_worker_of_each_world_is_asked_what_waits():
    waits, fine = {**STATUS, "waits": ASK_AFTER}, {**STATUS, "name": "w9", "waits": ASK_AFTER / 2}
    joining = {"name": "new", "state": "joining"}
    told = {2: status(waits, fine), 1: status(waits, joining), 3: status({**waits, "name": "w3"}, fine)}
    assert waiting_worlds(told) == {"1": ["w0"], "3": ["w3"]}


# -- several launchers


def launcher(node, *told, **more):
    return {**run_of(*told).snapshot(), "node": node, "started": AT, **more}


def alpha(*more):
    return launcher(
        "alpha", h.SlotTaken(AT, 0, 2), h.WorkerStarted(AT, 0, "hub", 0, 0, 4000, 0),
        h.WorldChanged(AT + 1, 0, "w0", "active", 1), *more,
    )  # fmt: skip


def beta(*more):
    return launcher(
        "beta", h.SlotTaken(AT, 1, 2), h.WorkerStarted(AT, 1, "worker", 0, 0, 4000, 0, "/logs/out"),
        h.WorldChanged(AT + 1, 1, "w0", "active", 1), h.WorldChanged(AT + 1, 1, "own", "active", 1), *more,
    )  # fmt: skip


def test_a_run_of_several_nodes_is_one():
    status_of_hub = {
        **STATUS, "generation": 1, "members": [[0, 4000, "alpha", ""], [1, 4000, "beta", ""]],
    }  # fmt: skip
    found = RunViews().view(alpha(), (beta(),), {0: status(status_of_hub)}, {})
    assert members(found, "w0") == [(0, 0, "active"), (1, 1, "active")]
    assert members(found, "own") == [(-1, 1, "active")]
    assert [(each["id"], each["rank"], each["logs"]) for each in found["processes"]] == [
        ("alpha/4000", 0, []), ("beta/4000", 1, []),
    ]  # fmt: skip
    assert found["title"].endswith("on alpha")
    assert {each["text"] for each in found["events"]} >= {
        "rank 0 (hub:0) w0 active, generation 1", "beta: rank 1 (worker:0) w0 active, generation 1",
    }  # fmt: skip
    assert [each["id"] for each in found["events"]] == list(range(1, len(found["events"]) + 1))


def test_a_world_of_two_nodes_breaks_and_heals_for_both():
    views = RunViews()
    gone = h.WorldChanged(AT + 5, 1, "w0", "broken", 1, "said late", "crashed", ranks=(0,))
    first = h.WorldChanged(AT + 4.9, 0, "w0", "broken", 1, "said first", "hung", ranks=(1,))
    (world,) = [e for e in views.view(alpha(first), (beta(gone),), {}, {})["worlds"] if e["name"] == "w0"]
    assert world["state"] == "broken"
    back = h.WorldChanged(AT + 6, 0, "w0", "active", 2)
    (world,) = [
        e for e in views.view(alpha(first, back), (beta(gone),), {}, {})["worlds"] if e["name"] == "w0"
    ]
    assert world["state"] != "active"
    view = views.view(
        alpha(first, back), (beta(gone, h.WorldChanged(AT + 6.5, 1, "w0", "active", 2)),), {}, {}
    )
    assert [each["state"] for each in view["worlds"]] == ["active", "active"]
    (fault,) = view["faults"]
    assert (fault["detail"], fault["cause"], fault["healed"], fault["ms"]) == (
        "said first",
        "hung",
        True,
        1600.0,
    )
    assert [(each["what"], each["ms"]) for each in fault["steps"]] == [
        ("seen", 0.0), ("told", 100.0), ("active", 1100.0), ("active", 1600.0),
    ]  # fmt: skip


def test_planned_ranks_are_known_before_any_worker_answers():
    state = RunState(clock=lambda: AT + 200, places={("w0", 0): 1, ("w0", 1): 0})
    for each in begun(1):
        state.apply(each)
    found = RunViews().view(state.snapshot(), (), {}, {})
    assert members(found, "w0") == [(0, 1, "active"), (1, 0, "active")]


def test_a_member_of_which_no_launcher_has_told_is_in_the_others_roster():
    status_of_hub = {**STATUS, "generation": 1, "members": [[0, 4000, "alpha", ""], [1, 4000, "beta", ""]]}
    silent = launcher("beta", h.SlotTaken(AT, 1, 2), h.WorkerStarted(AT, 1, "worker", 0, 0, 4000, 0))
    found = RunViews().view(alpha(), (silent,), {0: status(status_of_hub)}, {})
    assert members(found, "w0") == [(0, 0, "active"), (1, 1, "active")]
    assert members(RunViews().view(alpha(), (), {0: status(status_of_hub)}, {}), "w0") == [
        (0, 0, "active"), (1, None, "active"),
    ]  # fmt: skip
