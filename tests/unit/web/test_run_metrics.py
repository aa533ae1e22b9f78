"""A run's numbers for Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="numbers need prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from unit.web.test_views import PENDING, hub, run_views, snapshot

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
