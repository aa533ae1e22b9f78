"""What is shown of worlds of a range: members, who waits, whose state is coming; and of workers that retire."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from kits.runstatekit import AT, run_of

from multiworld.events import WorldActive, WorldStateReceived
from multiworld.launched.reports import LauncherReports
from multiworld.run import events as h
from multiworld.run.view.layout import layout, plain
from multiworld.run.view.log import EventLog
from multiworld.run.view.world_state import range_state


def trainers(number):
    return [h.WorkerStarted(AT, rank, "trainer", rank, rank, 4000 + rank, 0) for rank in range(number)]


def active(rank, generation, size, at=AT + 1):
    return h.WorldChanged(at, rank, "train", "active", generation, size=size, sizes="1:4")


def world(*told):
    return run_of(*told).snapshot()["worlds"][0]


TWO = [*trainers(3), active(0, 1, 2), active(1, 1, 2)]
WAITS = h.WorldChanged(AT + 2, 2, "train", "joining", 0)


def test_a_candidate_leaves_the_world_active():
    seen = world(*TWO, WAITS)
    assert (seen["state"], seen["generation"]) == ("active", 1)
    assert (seen["size"], seen["sizes"], seen["waiting"]) == (2, "1:4", 1)
    grown = world(*TWO, WAITS, active(2, 2, 3), active(0, 2, 3))
    assert (grown["state"], grown["generation"], grown["size"], grown["waiting"]) == ("active", 2, 3, 0)


def test_members_that_are_gone_break_it_until_the_others_go_on():
    lost = [*TWO, h.WorkerFailed(AT + 3, 1, 4001, 0, -9, "killed")]
    assert world(*lost)["state"] == "broken"
    seen = world(*lost, active(0, 2, 1))
    assert (seen["state"], seen["generation"], seen["size"]) == ("active", 2, 1)


@pytest.mark.parametrize(
    ("reports", "state"),
    [
        ([("joining", 0), ("joining", 0)], ("joining", 0)),
        ([("active", 3), ("closed", 2), ("gone", 2), ("joining", 2), ("failed", 0)], ("active", 3)),
        ([("active", 3), ("active", 2)], ("active", 3)),
        ([("active", 3), ("broken", 3)], ("broken", 3)),
        ([("active", 3), ("broken", 2)], ("active", 3)),
        ([("closed", 3), ("gone", 2)], ("gone", 3)),
        ([("closed", 3), ("closed", 2)], ("closed", 3)),
    ],
)
def test_the_state_of_a_world_of_a_range(reports, state):
    assert range_state(reports) == state


def test_a_state_that_comes_is_shown_until_it_is_there():
    coming = [*TWO, active(2, 2, 3), active(0, 2, 3), h.StateProgress(AT + 3, 2, "train", 40, 100)]
    assert world(*coming)["members"][2] == {
        "rank": 2, "state": "active", "generation": 2, "received": 40, "total": 100,
    }  # fmt: skip
    assert "train: 3 of 1:4 members, rank 2 has 40 % of its state" in plain(
        layout(run_of(*coming).snapshot(), 100)
    )
    there = [*coming, h.StateProgress(AT + 4, 2, "train", 100, 100)]
    assert "total" not in world(*there)["members"][2]
    assert "train: 2 of 1:4 members, 1 waiting" in plain(layout(run_of(*TWO, WAITS).snapshot(), 100))
    texts = [each["text"] for each in run_of(*there).snapshot()["last"]]
    assert not any("bytes" in text for text in texts)


def test_a_worker_that_retires_is_no_failure_and_no_restart():
    told = [*TWO, h.WorkerRetiring(AT + 2, 1, 60.0)]
    assert run_of(*told).snapshot()["workers"][1]["state"] == "retiring"
    told.append(active(1, 2, 2))
    assert run_of(*told).snapshot()["workers"][1]["state"] == "retiring"
    told.append(h.WorkerEnded(AT + 3, 1, 4001))
    assert run_of(*told).snapshot()["workers"][1]["state"] == "ended"
    told.append(h.WorkerStarted(AT + 4, 1, "trainer", 1, 1, 4101, 0))
    again = run_of(*told).snapshot()["workers"][1]
    assert (again["state"], again["restarts"]) == ("up", 0)


def test_a_worker_that_is_retired_has_closed_its_worlds_however_it_ends():
    alone = [trainers(2)[1], active(1, 1, 1)]
    failed = h.WorkerFailed(AT + 2, 1, 4001, 0, -9, "killed")
    retiring = h.WorkerRetiring(AT + 4, 1, 60.0)
    for how in (
        [retiring, h.WorkerStopped(AT + 5, 1, 4001, -15)],
        [failed, h.WorkerRestarting(AT + 3, 1, 1, 60.0, 2), retiring],  # before it was started again
    ):
        told = [*alone, *how]
        assert run_of(*told).snapshot()["workers"][0]["state"] == "stopped"
        assert world(*told)["state"] == "closed", "no alert: it is missed by none"
    assert world(*alone, failed)["state"] == "gone"


def test_the_log_has_it():
    stream = io.StringIO()
    log = EventLog(stream)
    for event in (*TWO[2:], h.WorkerRetiring(AT + 2, 1, 60.0), h.StateProgress(AT + 3, 2, "train", 4, 9)):
        log(event)
    log(h.WorldChanged(AT, 0, "w", "active", 1))
    log.close()
    lines = stream.getvalue().splitlines()
    assert lines[1].endswith(
        'event=world world=train state=active generation=1 detail="" cause="" size=2 sizes=1:4'
    )
    assert lines[3].endswith("worker=1 level=info event=retiring drain=60")
    assert lines[4].endswith('generation=1 detail="" cause=""')
    assert len(lines) == 5


def test_a_worker_tells_its_launcher(monkeypatch):
    said = []
    client = LauncherReports()
    client.client = SimpleNamespace(report=said.append, alive=True)
    joined = {
        "train": SimpleNamespace(_plan=SimpleNamespace(assigned=True, least=1, world_size=4)),
        "other": SimpleNamespace(_plan=SimpleNamespace(assigned=False)),
    }
    monkeypatch.setattr("multiworld.launched.reports.worlds", lambda: joined)
    client.tell(WorldActive("train", 3, 0, 1.0, 2))
    client.tell(WorldActive("other", 3, 0, 1.0, 2))
    client.tell(WorldStateReceived("train", 3, 0, 1.0, 1, 10, 30))
    assert [(each["size"], each["sizes"]) for each in said[:2]] == [(2, "1:4"), (2, "")]
    assert said[2] == {"world": "train", "received": 10, "total": 30}
