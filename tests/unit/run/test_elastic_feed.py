"""What torch elastic's events and metrics have of a run's worlds."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from multiworld.run import elastic_feed
from multiworld.run import events as h
from multiworld.run.elastic_feed import ElasticFeed


@pytest.fixture
def told(monkeypatch):
    """(events, metrics)."""
    events, metrics = [], []
    monkeypatch.setattr(
        elastic_feed, "record", lambda event, destination: events.append((event, destination))
    )
    monkeypatch.setattr(elastic_feed, "put_metric", lambda *args: metrics.append(args))
    return events, metrics


def broken(rank, generation=1, cause="crashed"):
    return h.WorldChanged(2.5, rank, "w", "broken", generation, "why", cause)


def test_a_breakage_is_one_metric_and_an_event_of_each_member(told):
    events, metrics = told
    feed = ElasticFeed("console", "alpha", "job7")
    for each in (
        broken(0),
        broken(3),
        h.WorldChanged(3.0, 0, "w", "active", 2, size=4),
        broken(3),
        broken(0, 2, "hung"),
    ):
        feed(each)
    assert metrics == [("worlds.broken.crashed", 1, "multiworld"), ("worlds.broken.hung", 1, "multiworld")]
    assert [(event.name, event.metadata["rank"]) for event, _ in events] == [
        ("multiworld.world.broken", 0), ("multiworld.world.broken", 3), ("multiworld.world.active", 0),
        ("multiworld.world.broken", 3), ("multiworld.world.broken", 0),
    ]  # fmt: skip
    event, destination = events[0]
    assert (destination, event.timestamp, event.source.value) == ("console", 2500, "AGENT")
    assert event.metadata == {
        "node": "alpha", "run_id": "job7", "world": "w", "generation": 1, "rank": 0, "cause": "crashed", "detail": "why",
    }  # fmt: skip
    event.serialize()


def test_a_world_that_begins_anew_breaks_anew(told):
    _, metrics = told
    feed = ElasticFeed("null", "alpha", "job7")
    again = h.WorkerStarted(3.0, 0, "worker", 0, 0, 77, 1), h.WorldChanged(4.0, 0, "w", "active", 1, size=2)
    for each in (broken(0), broken(1), *again, broken(0), broken(1)):
        feed(each)
    assert metrics == [("worlds.broken.crashed", 1, "multiworld")] * 2


def test_the_rest(told):
    events, metrics = told
    feed = ElasticFeed("null", "alpha", "job7")
    for each in (
        broken(0, cause="left"), h.WorldChanged(1.0, 0, "w", "joining", 0), h.WorldChanged(1.0, 0, "w", "failed", 1),
        h.WorkerRestarting(1.0, 3, 1, 0.0, 2), h.NodeLost(1.0, "beta", 1, "hung", ()), h.WorkerEnded(1.0, 3, 7),
    ):  # fmt: skip
        feed(each)
    assert [event.name for event, _ in events] == [
        "multiworld.world.join_failed", "multiworld.worker.restarting", "multiworld.node.lost",
    ]  # fmt: skip
    assert [name for name, *_ in metrics] == ["worlds.joins_failed", "workers.restarts", "nodes.lost.hung"]


def test_memory_is_bounded(told):
    feed = ElasticFeed("null", "alpha", "job7")
    for number in range(3 * elastic_feed._MOST):
        feed(h.WorldChanged(1.0, 0, f"w{number}", "broken", 1, "", "crashed"))
    assert len(feed._broken) == elastic_feed._MOST
