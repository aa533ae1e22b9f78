"""A run's numbers for Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="numbers need prometheus_client")

from kits.runstatekit import AT
from prometheus_client.parser import text_string_to_metric_families
from unit.web.test_views import PENDING, hub, run_views, snapshot

from multiworld.run import events as h
from multiworld.web import run_metrics
from multiworld.web.run_metrics import exposition_of_run
from multiworld.web.run_view import RunViews


def samples(view):
    body, content_type = exposition_of_run(view, "text/plain")
    assert content_type.startswith("text/plain")
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_what_a_run_counts():
    found = samples(run_views()[0])
    assert found["multiworld_run_info", "alpha", "worker", "job7"] == 1
    assert found["multiworld_run_workers", "up"] == 3
    assert found["multiworld_run_workers", "failed"] == 0
    assert found["multiworld_run_worlds", "active"] == 2
    assert found["multiworld_run_world_active", "w0"] == found["multiworld_run_world_generation", "w1"] == 1
    assert found["multiworld_run_world_pending_seconds", "w0"] > 0
    assert found["multiworld_run_world_pending_seconds", "w1"] == 0
    assert (
        found["multiworld_run_worlds_broken_total", "crashed"]
        == found[("multiworld_run_worker_failures_total",)]
        == 0
    )
    assert found[("multiworld_run_launcher_answers",)] == 1
    assert samples(run_views()[1])[("multiworld_run_launcher_answers",)] == 0


def test_what_is_idle_does_not_count_as_waiting():
    idle = {"pending": [{**PENDING[0], "idle": True}], "waited": {}}
    found = samples(RunViews().view(snapshot(), (), {0: hub()}, {"w0": idle}))
    assert found["multiworld_run_world_pending_seconds", "w0"] == 0


def active(*more):
    """Of the worlds w0 and w1, where nothing but their launcher answers."""
    found = samples(RunViews().view(snapshot(*more), (), {}, {}))
    return {key[1]: value for key, value in found.items() if key[0] == "multiworld_run_world_active"}


LEFT = [
    h.WorkerEnded(AT + 10, 1, 4001),
    h.WorldChanged(AT + 10, 0, "w0", "broken", 1, "rank 0 closed the world", "left"),
]
AGAIN = h.WorldChanged(AT + 11, 0, "w0", "joining", 0)


def test_a_world_that_a_member_left_in_good_order_is_not_said_to_be_inactive():
    """Nor while the hub's Rejoiner tries, which it does for as long as the program runs."""
    failed = h.WorldChanged(AT + 41, 0, "w0", "failed", 0, "rank 0 did not come", "left")
    for more in (LEFT, [*LEFT, AGAIN], [*LEFT, AGAIN, failed], [*LEFT, AGAIN, failed, AGAIN]):
        assert active(*more) == {"w1": 1}
    closed = h.WorldChanged(AT + 12, 0, "w0", "closed", 0)
    assert active(*LEFT, closed) == {"w1": 1}
    assert active(*LEFT, AGAIN, h.WorldChanged(AT + 12, 0, "w0", "active", 2)) == {"w0": 1, "w1": 1}


def test_members_that_are_gone_do_not_count_where_the_others_have_closed_their_world():
    whole = [h.WorldChanged(AT + 11, rank, "w0", "active", 2) for rank in (0, 1)]
    gone = [*whole, h.WorkerFailed(AT + 20, 1, 4001, 0, 1, "exit code 1")]
    assert active(*gone, h.WorldChanged(AT + 21, 0, "w0", "closed", 2)) == {"w1": 1}


def test_a_world_that_has_to_be_whole_is_said_to_be_inactive():
    crashed = h.WorldChanged(AT + 12, 0, "w0", "broken", 2, "rank 0 crashed", "crashed")
    lost = [h.WorkerFailed(AT + 20, 0, 4000, 0, 1, "exit code 1"), h.WorkerRestarting(AT + 20, 0, 1, 0.0, 2)]
    started = h.WorkerStarted(AT + 21, 0, "hub", 0, 0, 5000, 1)
    newcomer = [
        h.WorkerStarted(AT + 20, 1, "worker", 0, 1, 5001, 1),
        h.WorldChanged(AT + 21, 1, "w0", "joining", 0),
    ]
    whole = [h.WorldChanged(AT + 11, rank, "w0", "active", 2) for rank in (0, 1)]
    for more in (
        [h.WorldChanged(AT + 12, 0, "w0", "joining", 0)],
        [*whole, crashed],
        [*LEFT, *lost, started, h.WorldChanged(AT + 22, 0, "w0", "joining", 0)],
        [*LEFT, *newcomer],
    ):
        assert active(*more)["w0"] == 0


def test_labels_are_bounded(monkeypatch):
    monkeypatch.setattr(run_metrics, "MOST_WORLDS", 1)
    names = {key[1] for key in samples(run_views()[0]) if key[0] == "multiworld_run_world_active"}
    assert names == {"w0"}
    assert samples(run_views()[0])["multiworld_run_worlds", "active"] == 2


def test_the_page_says_what_there_is():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    body, _ = exposition_of_run(run_views()[0], "text/plain")
    there = {
        (sample.name, tuple(sorted(sample.labels)))
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    rows = re.findall(r"^\| `(multiworld_run_\w+)` \|([^|]*)\|", page, re.MULTILINE)
    assert {(name, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, labels in rows} == there
