"""The state of a run: its snapshot after which events, and that no event breaks it."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.runstatekit import ANYTHING, AT, begun, killed, run_of

from multiworld.events import (
    Breakage,
    Cause,
    MemberBusy,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
)
from multiworld.launched.reports import LauncherReports
from multiworld.run import events as h
from multiworld.run.view.messages import ending, natural, one_line, span
from multiworld.run.view.state import KEPT, LAST, UP_AFTER, RunState
from multiworld.run.view.world_state import world_state

ALIVE = {"starting", "up", "retiring"}
STATES = {*ALIVE, "failed", "restarting", "ended", "stopped"}
WORLD_STATES = {"joining", "active", "broken", "closed", "failed", "gone"}


def worker(state: RunState, rank: int) -> dict:
    return next(each for each in state.snapshot()["workers"] if each["rank"] == rank)


def world(state: RunState, name: str) -> dict:
    return next(each for each in state.snapshot()["worlds"] if each["name"] == name)


def test_the_keys_of_a_snapshot_are_those_that_the_docs_promise():
    seen = run_of(*begun(1), h.NodeJoined(AT, "beta", None), h.RunEnded(AT + 5, 3, "because")).snapshot()
    assert set(seen) == {
        "version", "run_id", "node", "restart", "max_restarts", "entrypoint", "started", "now", "seat", "nodes", "secure",
        "peers", "workers", "worlds", "awaited", "faults", "totals", "last", "ended",
    }  # fmt: skip
    assert seen["version"] == 1
    assert (seen["run_id"], seen["node"], seen["started"], seen["now"]) == ("job7", "alpha", AT, AT + 200)
    assert (seen["seat"], seen["nodes"]) == (0, 1)
    assert seen["peers"] == [{"node": "beta", "seat": None, "state": "spare", "since": AT}]
    assert seen["workers"][1] == {
        "rank": 1, "role": "worker", "role_rank": 0, "local_rank": 1, "pid": 4001, "attempt": 0, "restarts": 0,
        "state": "up", "since": AT, "last": "w0 active, generation 1", "logs": {},
        "worlds": [{"name": "w0", "state": "active", "generation": 1}],
    }  # fmt: skip
    assert seen["worlds"] == [{
        "name": "w0", "state": "active", "generation": 1, "note": "",
        "members": [
            {"rank": 0, "state": "active", "generation": 1}, {"rank": 1, "state": "active", "generation": 1},
        ],
    }]  # fmt: skip
    assert seen["ended"] == {"exitcode": 3, "reason": "because"}
    assert run_of().snapshot()["ended"] is None


def test_a_killed_worker_is_seen_failing_restarting_starting_and_up():
    told = killed(3)
    seen = []
    for upto in range(1, len(told) + 1):
        state = run_of(*begun(), *told[:upto], at=AT + 101)
        seen.append(
            (worker(state, 3)["state"], world(state, "w2")["state"], world(state, "w2")["generation"])
        )
    assert seen == [
        ("failed", "broken", 1),  # the hub has not said so yet: its member is dead
        ("restarting", "broken", 1),
        ("restarting", "broken", 1),
        ("starting", "broken", 1),
        ("starting", "joining", 1),
        ("starting", "joining", 1),
        ("up", "joining", 2),
        ("up", "active", 2),
    ]
    after = run_of(*begun(), *told)
    assert worker(after, 3)["pid"] == 4703
    assert (worker(after, 3)["attempt"], worker(after, 3)["restarts"]) == (1, 1)
    others = [each for each in after.snapshot()["workers"] if each["rank"] != 3]
    assert all(each["restarts"] == 0 and each["state"] == "up" for each in others)
    assert all(each["generation"] == 1 for each in after.snapshot()["worlds"] if each["name"] != "w2")


def test_a_worker_without_worlds_is_up_after_a_while():
    started = [*begun(0), h.WorkerStarted(AT, 1, "worker", 0, 1, 4001, 0)]
    assert worker(run_of(*started, at=AT + UP_AFTER - 1), 1)["state"] == "starting"
    assert worker(run_of(*started, at=AT + UP_AFTER), 1)["state"] == "up"
    over = h.WorkerEnded(AT + 1, 1, 4001)
    assert worker(run_of(*started, over, at=AT + UP_AFTER), 1)["state"] == "ended"


def test_what_a_process_said_before_it_died_is_not_believed_afterwards():
    dead = h.WorkerFailed(AT + 9, 1, 4001, 0, 1, "ValueError: x")
    state = run_of(*begun(1), dead, h.WorldChanged(AT + 10, 1, "w0", "active", 2))
    assert worker(state, 1)["state"] == "failed"
    assert worker(state, 1)["last"] == "failed: ValueError: x"
    assert world(state, "w0")["members"][1] == {"rank": 1, "state": "gone", "generation": 1}


def test_the_end_of_an_older_process_does_not_touch_the_new_one():
    state = run_of(*begun(), *killed(3), h.WorkerStopped(AT + 150, 3, 4003, -15))
    assert worker(state, 3)["state"] == "up"
    assert world(state, "w2")["state"] == "active"


def test_a_worker_that_ended_well_leaves_no_trouble_behind():
    ended = [h.WorkerEnded(AT + 10, rank, 4000 + rank) for rank in range(9)]
    seen = run_of(*begun(), *ended).snapshot()
    assert {each["state"] for each in seen["worlds"]} == {"closed"}


def test_a_local_place_holds_one_worker():
    """After a new assignment the same local rank may have another rank."""
    moved = h.WorkerStarted(AT + 10, 11, "worker", 10, 1, 5000, 0)
    seen = run_of(
        *begun(1), h.WorkerStopped(AT + 9, 1, 4001, -15), h.SlotTaken(AT + 9, 1, 2), moved
    ).snapshot()
    assert [each["rank"] for each in seen["workers"]] == [0, 11]
    assert [each["rank"] for each in seen["worlds"][0]["members"]] == [0]


def test_a_spare_node_forgets_the_workers_it_had():
    stopped = [h.WorkerStopped(AT + 9, rank, 4000 + rank, -15) for rank in range(2)]
    seen = run_of(*begun(1), *stopped, h.SlotTaken(AT + 10, None, 2)).snapshot()
    assert (seen["workers"], seen["worlds"], seen["seat"], seen["nodes"]) == ([], [], None, 2)


@pytest.mark.parametrize("slot", [None, 1])
def test_a_node_forgets_the_workers_that_end_after_it_has_lost_their_seat(slot):
    """The launcher hears of it first, and then its agent ends the workers."""
    taken = h.SlotTaken(AT + 9, slot, 2)
    stopped = [h.WorkerStopped(AT + 10, rank, 4000 + rank, -9) for rank in range(3)]
    late = h.WorldChanged(AT + 11, 2, "w1", "broken", 1, "rank 1 crashed", "crashed")
    begins = h.WorkerStarted(AT + 11, 3, "worker", 2, 0, 5000, 0)
    joins = h.WorldChanged(AT + 12, 3, "w2", "active", 2)
    seen = run_of(*begun(2), taken).snapshot()
    assert [each["rank"] for each in seen["workers"]] == [0, 1, 2], "they are still there"
    state = run_of(*begun(2), taken, *stopped, late)
    seen = state.snapshot()
    assert (seen["workers"], seen["worlds"], seen["awaited"]) == ([], [], [])
    for each in (h.SlotTaken(AT + 11, 1, 2), begins, joins, h.WorkerStopped(AT + 13, 3, 5000, -9)):
        state.apply(each)
    assert [(each["rank"], each["state"]) for each in state.snapshot()["workers"]] == [(3, "stopped")]


def test_a_lost_node_and_the_worlds_that_are_not_whole_without_it():
    lost = h.NodeLost(AT + 10, "beta", 1, "unreachable", ("w0", "elsewhere"))
    state = run_of(*begun(2), h.NodeJoined(AT, "beta", 1), lost)
    assert state.snapshot()["peers"] == [{"node": "beta", "seat": 1, "state": "lost", "since": AT + 10}]
    assert world(state, "w0")["note"] == "not whole: node beta is lost (unreachable)"
    assert world(state, "w1")["note"] == ""
    assert world(state, "elsewhere")["state"] == "gone"  # nobody of this node is in it
    state.apply(h.WorldChanged(AT + 20, 0, "w0", "active", 2, size=2))
    assert world(state, "w0")["note"] == ""


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([("active", 2), ("active", 2)], ("active", 2)),
        ([("active", 2), ("active", 1)], ("joining", 2)),
        ([("active", 2), ("broken", 1)], ("joining", 2)),
        ([("active", 1), ("broken", 1)], ("broken", 1)),
        ([("joining", 1), ("broken", 1)], ("broken", 1)),
        ([("joining", 0), ("active", 1)], ("joining", 1)),
        ([("joining", 0), ("failed", 0)], ("failed", 0)),
        ([("active", 1), ("gone", 1)], ("broken", 1)),
        ([("joining", 1), ("gone", 1)], ("joining", 1)),
        ([("active", 1), ("closed", 1)], ("active", 1)),
        ([("closed", 1), ("closed", 2)], ("closed", 2)),
        ([("closed", 1), ("gone", 1)], ("gone", 1)),
        ([], ("gone", 0)),
    ],
)
def test_a_worlds_state_from_its_members(reports, expected):
    assert world_state(reports) == expected
    assert world_state(reversed(reports)) == expected


def test_only_the_last_happenings_are_kept_each_on_one_line():
    state = run_of(*(h.Note(AT + at, 20, f"note {at}\n\x1b[2Jagain" + "x" * 900) for at in range(50)))
    last = state.snapshot()["last"]
    assert [each["at"] for each in last] == [AT + at for at in range(50 - LAST, 50)]
    assert [each["number"] for each in state.snapshot(after=10)["last"]] == list(range(11, 51))
    assert state.snapshot(after=50)["last"] == []
    for at in range(50, KEPT + 60):
        state.apply(h.StateProgress(AT + at, 0, "w", 1, 2))  # it has no number
        state.apply(h.Note(AT + at, 20, "more"))
    assert [each["number"] for each in state.snapshot(after=0)["last"]] == list(range(61, KEPT + 61))
    assert all(each["text"].isprintable() and len(each["text"]) <= 500 for each in last)


@pytest.mark.parametrize("course", [(("active", 1), ("closed", 1)), (("joining", 0), ("failed", 0))])
def test_worlds_without_end_do_not_fill_the_memory(course):
    state = RunState(planned={"planned": {1}})
    told = [*begun(1), h.WorldChanged(AT + 2, 1, "again", "active", 1)]
    told += [h.WorldChanged(AT + 2, 1, name, "failed", 0) for name in ("again", "planned")]
    for each in told:
        state.apply(each)
    for at in range(600):
        for said, generation in course:
            state.apply(h.WorldChanged(AT + 2, 1, f"batch-{at}", said, generation))
    seen = state.snapshot()
    assert len(seen["worlds"]) <= 512
    # What is in use stays, and what its workers want to be in.
    assert {"w0", "again", "planned"} <= {each["name"] for each in seen["worlds"]}


@given(told=st.lists(ANYTHING, max_size=60), at=st.floats(0, 2e9))
def test_whatever_happens_the_picture_is_sound(told, at):
    state = run_of(*told, at=at)
    seen = state.snapshot()
    assert json.loads(json.dumps(seen)) == seen
    assert state.changes == len(told)
    ranks = [each["rank"] for each in seen["workers"]]
    assert ranks == sorted(set(ranks))
    assert len({each["local_rank"] for each in seen["workers"]}) == len(ranks)
    assert {each["state"] for each in seen["workers"]} <= STATES
    assert len(seen["last"]) == min(
        sum(not isinstance(one, h.StateProgress | h.CallsRaised) for one in told), LAST
    )
    for each in seen["workers"]:
        assert each["restarts"] < max(1, sum(isinstance(one, h.WorkerStarted) for one in told))
    # Both views tell the same of each member of each world, and a dead worker is in none.
    by_world = {
        (each["name"], m["rank"], m["state"], m["generation"])
        for each in seen["worlds"]
        for m in each["members"]
    }
    by_worker = {
        (w["name"], each["rank"], w["state"], w["generation"])
        for each in seen["workers"]
        for w in each["worlds"]
    }
    assert {each for each in by_world if each[1] in ranks} == by_worker
    for each in seen["workers"]:
        if each["state"] not in ALIVE:
            assert {w["state"] for w in each["worlds"]} <= {"gone", "closed"}
    assert {each["state"] for each in seen["worlds"]} <= WORLD_STATES
    for each in seen["worlds"]:
        if each["state"] == "active":
            living = [m for m in each["members"] if m["state"] != "closed"]
            assert living
            found = {(m["state"], m["generation"]) for m in living}
            assert ("active", each["generation"]) in found
            assert len(found) == 1 or "sizes" in each


def test_threads_may_tell_and_look_at_once():
    state = run_of(*begun())
    told, faults = [*killed(3)], []

    def tell() -> None:
        for _ in range(200):
            for each in told:
                state.apply(each)

    def look() -> None:
        try:
            for _ in range(200):
                json.dumps(state.snapshot())
        except Exception as fault:  # noqa: BLE001  (in a thread: told to the test)
            faults.append(fault)

    threads = [threading.Thread(target=each) for each in (tell, tell, look, look)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not faults
    assert not any(each.is_alive() for each in threads)
    assert state.changes == len(begun()) + 400 * len(told)


def test_words():
    assert [ending(code) for code in (None, 0, 3, -9, -200)] == [
        "exit code not known", "exit code 0", "exit code 3", "killed by SIGKILL", "killed by signal 200",
    ]  # fmt: skip
    assert [span(at) for at in (-1, 3.9, 14, 59, 61, 3600, 3661 + 86400, 90 * 3600)] == [
        "0 s", "3 s", "10 s", "55 s", "1 min", "1 h 00 min", "1 d 1 h", "3 d 18 h",
    ]  # fmt: skip
    assert sorted(["w10", "w2", "w", "a1b3", "a1b20", "10"], key=natural) == [
        "10",
        "a1b3",
        "a1b20",
        "w",
        "w2",
        "w10",
    ]
    assert one_line("a\nb\tc\x1b[31md\u2028") == "a b c [31md"


def test_the_snapshot_on_the_page_has_the_keys_of_a_real_one():
    page = (Path(__file__).parents[3] / "docs" / "run-output.md").read_text(encoding="utf-8")
    said = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL).group(1))
    logged = h.WorkerStarted(AT, 0, "hub", 0, 0, 4000, 0, "/logs/attempt_1/1/stdout.log")
    broke = h.WorldChanged(AT + 9, 0, "w0", "broken", 1, "rank 0 crashed", "crashed", ranks=(0,))
    real = run_of(*begun(1)[:2], logged, *begun(1)[3:], h.NodeJoined(AT, "beta", 1), broke).snapshot()
    real["totals"] |= {"failures": 1, "restarts": 1}

    def shape(found: object) -> object:
        if isinstance(found, dict):
            return {key: shape(value) for key, value in found.items()}
        return [shape(each) for each in found[:1]] if isinstance(found, list) else None

    assert shape(said) == shape(real)
    assert said["version"] == real["version"]


def test_a_member_that_is_busy_is_noted_until_it_answers_or_its_world_breaks():
    busy = h.WorldChanged(AT + 110, 0, "w0", "active", 1, "rank 1 busy: runs, but does not answer")
    for over in ("active", "broken"):
        state = run_of(*begun(), busy)
        assert world(state, "w0")["note"] == busy.detail
        assert world(state, "w0")["state"] == "active"
        assert world(state, "w1")["note"] == ""
        state.apply(h.WorldChanged(AT + 120, 0, "w0", over, 1))
        assert world(state, "w0")["note"] == ""


def test_a_worker_tells_its_launcher_which_member_is_busy():
    told = []
    launcher = LauncherReports()
    launcher.client = SimpleNamespace(report=told.append, alive=True)
    launcher.tell(MemberBusy("w", 2, 0, 1.0, (1,), busy=True))
    launcher.tell(MemberBusy("w", 2, 0, 2.0, (1, 3), busy=True))
    launcher.tell(MemberBusy("w", 2, 0, 3.0, (1,), busy=False))
    assert {(each["world"], each["state"], each["generation"], each["cause"]) for each in told} == {
        ("w", "active", 2, "")
    }
    assert [each["detail"] for each in told] == [
        "rank 1 busy: runs, but does not answer",
        "ranks 1, 3 busy: run, but do not answer",
        "rank 3 busy: runs, but does not answer",
    ]
    launcher.tell(MemberBusy("w", 2, 0, 4.0, (5,), busy=True))
    launcher.tell(MemberBusy("w", 2, 0, 5.0, (3, 5), busy=False))
    assert [each["detail"] for each in told[3:]] == ["ranks 3, 5 busy: run, but do not answer", ""]


def test_a_member_that_answers_again_makes_no_world_whole():
    notes = [
        world(run_of(*begun(), h.NodeLost(AT, "beta", 1, "hung", ("w0",)), change), "w0")["note"]
        for change in (
            h.WorldChanged(AT + 1, 0, "w0", "active", 1),
            h.WorldChanged(AT + 1, 0, "w0", "active", 2, size=2),
        )
    ]
    assert notes == ["not whole: node beta is lost (hung)", ""]


def test_a_join_that_fails_after_a_close_has_no_cause_of_an_earlier_breakage():
    told = []
    launcher = LauncherReports()
    launcher.client = SimpleNamespace(report=told.append, alive=True)
    gone = Breakage(Cause.LEFT, (1,), "rank 1 left", 1.0)
    for event in (
        WorldBroken("w", 1, 0, 1.0, gone),
        WorldJoining("w", 0, 0, 2.0),
        WorldJoinFailed("w", 0, 0, 3.0, OSError("late")),  # that would have mended it
        WorldClosed("w", 1, 0, 4.0),
        WorldJoining("w", 0, 0, 5.0),
        WorldJoinFailed("w", 0, 0, 6.0, OSError("late")),
        WorldJoining("w", 0, 0, 7.0),
        WorldClosed("w", 0, 0, 8.0),
        WorldJoinFailed("w", 0, 0, 9.0, OSError("closed")),  # because of the close, which was told
    ):
        launcher.tell(event)
    assert [(each["state"], each["cause"]) for each in told] == [
        ("broken", "left"), ("joining", ""), ("failed", "left"), ("closed", ""), ("joining", ""), ("failed", ""),
        ("joining", ""), ("closed", ""),
    ]  # fmt: skip
    assert [launcher._causes, launcher._closed, launcher._joining, launcher._busy] == [{}, set(), set(), {}]


def test_faults_and_their_healing_are_told():
    state = run_of(*begun(), *killed(3))
    state.apply(h.CallsRaised(AT + 100.102, 0, "w2", 1))
    (fault,) = state.snapshot()["faults"]
    assert (fault["world"], fault["cause"], fault["at"], fault["ms"]) == ("w2", "crashed", AT + 100.1, 500.0)
    assert fault["steps"].pop(1) == {"what": "unblocked", "at": AT + 100.102, "ms": 2.0, "text": "worker 0"}
    assert [(each["what"], each["text"]) for each in fault["steps"]] == [
        ("seen", "worker 0"), ("joining", "worker 0"), ("joining", "worker 3"), ("active", "worker 3"),
        ("active", "worker 0"),
    ]  # fmt: skip
    assert state.snapshot()["totals"] == {
        "failures": 1, "restarts": 1, "nodes_lost": 0, "broken": {"crashed": 1},
    }  # fmt: skip
    state.apply(h.WorldChanged(AT + 110, 0, "w1", "broken", 1, "rank 0 left", "left"))
    state.apply(h.NodeLost(AT + 111, "beta", 1, "crashed", ()))
    assert state.snapshot()["totals"]["nodes_lost"] == 1
    assert len(state.snapshot()["faults"]) == 1


def test_more_worlds_than_faults_are_kept_break_and_each_counts_once():
    worlds = [f"w{number}" for number in range(64)]
    told = [
        h.WorldChanged(AT + 5, rank, name, "broken", 1, "rank 0 crashed", "crashed")
        for rank in range(1, 8)
        for name in worlds
    ]
    assert run_of(*begun(7), *told).snapshot()["totals"]["broken"] == {"crashed": len(worlds)}


def test_a_world_of_a_range_is_healed_without_the_lost():
    def said(at, rank, state, generation, **more):
        return h.WorldChanged(AT + at, rank, "train", state, generation, sizes="2:4", **more)

    told = [
        *begun(2),
        *(said(1, rank, "active", 1, size=3) for rank in range(3)),
        h.WorkerFailed(AT + 5, 2, 4002, 0, -9, "killed by SIGKILL"),
        *(said(5.1, rank, "broken", 1, cause="crashed", ranks=(2,)) for rank in range(2)),
        *(said(5.2, rank, "active", 2, size=2) for rank in range(2)),
    ]
    (fault,) = run_of(*told).snapshot()["faults"]
    assert (fault["healed"], fault["ms"], fault["ranks"]) == (True, 100.0, [2])


def test_what_happened_is_numbered_and_has_a_level():
    last = run_of(*begun(1), *killed(1)).snapshot()["last"]
    assert [each["number"] for each in last] == list(range(1, len(last) + 1))
    assert {each["text"]: each["level"] for each in last}[
        "rank 1 (worker:0) failed: killed by SIGKILL"
    ] == "warning"
    assert last[0]["level"] == "info"


def test_a_fault_of_a_world_that_all_have_closed_is_over():
    state = run_of(*begun(1), h.WorldChanged(AT + 5, 0, "w0", "broken", 1, "rank 1 crashed", "crashed"))
    state.apply(h.WorldChanged(AT + 6, 0, "w0", "closed", 1))
    assert [each["over"] for each in state.snapshot()["faults"]] == [False], "a member is in it"
    state.apply(h.WorldChanged(AT + 7, 1, "w0", "closed", 1))
    assert [each["over"] for each in state.snapshot()["faults"]] == [True]


def test_the_token_of_the_page_is_in_no_snapshot():
    state = run_of(h.Note(AT, 20, "page: http://127.0.0.1:8080/?token=s3cret"), *begun(1))
    assert "s3cret" not in json.dumps(state.snapshot())
    assert "page: http://127.0.0.1:8080/?token=..." in {each["text"] for each in state.snapshot()["last"]}


def test_another_node_has_the_seat_of_one_that_was_lost():
    lost = h.NodeLost(AT + 10, "beta", 1, "unreachable", ("w0", "elsewhere"))
    state = run_of(*begun(2), h.NodeJoined(AT, "beta", 1), h.NodeJoined(AT, "gamma", None), lost)
    state.apply(h.NodeJoined(AT + 11, "gamma", 1))
    seen = state.snapshot()
    assert seen["peers"] == [{"node": "gamma", "seat": 1, "state": "seated", "since": AT + 11}]
    assert [(each["name"], each["note"]) for each in seen["worlds"]] == [("w0", ""), ("w1", "")]
    assert seen["totals"]["nodes_lost"] == 1


def test_a_spare_that_has_left_is_not_missed():
    spare = [h.NodeJoined(AT, "beta", None), h.NodeLost(AT + 10, "beta", None, "left", ())]
    assert run_of(*begun(2), *spare).snapshot()["peers"] == []
    seen = run_of(*begun(2), h.NodeJoined(AT, "beta", 1), spare[1]).snapshot()
    assert [each["state"] for each in seen["peers"]] == ["seated"], "another launcher of that host"
    assert seen["totals"]["nodes_lost"] == 1


def test_a_world_that_misses_two_nodes_is_not_whole_with_one():
    lost = [h.NodeLost(AT + 10, node, slot, "hung", ("w0",)) for node, slot in (("beta", 1), ("gamma", 2))]
    state = run_of(*begun(2), *lost, h.NodeJoined(AT + 11, "delta", 2))
    assert world(state, "w0")["note"] == "not whole: node beta is lost (hung)"
    state.apply(h.SlotTaken(AT + 12, 1, 3))  # this one has the other seat now
    assert world(state, "w0")["note"] == ""
