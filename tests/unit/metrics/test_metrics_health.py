"""Answers to probes."""

from __future__ import annotations

import math
import threading
import time

import pytest

from multiworld.events import State
from multiworld.metrics import health
from multiworld.metrics.health import STILL, Health, live, ready
from multiworld.registry import Registry
from multiworld.watchdog import Watchdog

OK = Health(True, "ok")


def test_a_process_without_worlds_is_ready_and_live(process):
    assert (ready(), live()) == (OK, OK)


def test_every_world_that_is_not_closed_counts(process):
    process.add("w0")
    assert ready() == OK
    broken, behind = process.add("w1"), process.add("w2", number=3)
    broken.breaks(ago=2.0)
    behind.ready = False
    found = ready()
    assert not found.ok
    first, second = found.text.splitlines()
    assert first.startswith("world 'w1': broken, generation 1: crashed 2.")
    assert first.endswith(" s ago, rank 1: gone")
    assert second == "world 'w2': generation 3: this member has not its latest state yet"
    broken.state = State.JOINING
    assert ready().text.startswith("world 'w1': joining, generation 1: crashed")


def test_a_world_that_moves_on_has_no_breakage(process):
    process.add("w").state, process.known["w"].ready = State.JOINING, False
    assert ready().text == "world 'w': joining, generation 1"


def test_worlds_that_are_named_must_have_been_joined(process):
    process.add("w0")
    process.add("w1").breaks()
    process.names = ("new",)
    assert ready(["w0"]) == OK
    assert not ready(["w0", "w1"]).ok
    assert ready(["never"]) == Health(False, "world 'never': not joined")
    assert ready(["new"]) == Health(False, "world 'new': this process is joining it")


@pytest.mark.parametrize(
    ("still", "text"),
    [(STILL, "has not turned for 30 s"), (math.inf, "has ended")],
)
def test_a_watchdog_that_stands_still_ends_the_life(process, monkeypatch, still, text):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    process.still = STILL - 1
    assert live() == OK
    process.still = still
    found = live()
    assert (found.ok, text in found.text) == (False, True)


def test_a_process_that_was_stopped_and_goes_on_lives(process, monkeypatch):
    process.still = 500.0
    monkeypatch.setattr(time, "sleep", lambda _: setattr(process, "still", 0.0))
    assert live() == OK


# -- the real watchdog -----------------------------------------------------------------------------------------


@pytest.fixture
def watchdog():
    now = [100.0]
    made = Watchdog(clock=lambda: now[0])
    made.now = now
    yield made
    made.stop(time.monotonic() + 10)


def test_a_watchdog_says_how_long_it_stands_still(watchdog):
    assert watchdog.still() is None, "no thread is needed"
    endpoint = watchdog.endpoint("127.0.0.1")
    assert watchdog.still() == 0.0
    standing, go_on = threading.Event(), threading.Event()
    watchdog._post(lambda _: (standing.set(), go_on.wait(30)))
    assert standing.wait(30)
    watchdog.now[0] += 40
    assert watchdog.still() == 40.0
    go_on.set()
    deadline = time.monotonic() + 30
    while watchdog.still():
        assert time.monotonic() < deadline
        watchdog._post(lambda _: None)
        time.sleep(0.01)
    watchdog.release_endpoint(endpoint)
    assert watchdog.still() is None


def test_one_whose_thread_is_gone_stands_still_for_ever(watchdog, monkeypatch):
    endpoint = watchdog.endpoint("127.0.0.1")
    thread = watchdog._thread
    monkeypatch.setattr(watchdog, "_thread", threading.Thread())
    assert watchdog.still() == math.inf
    monkeypatch.setattr(watchdog, "_thread", thread)
    watchdog.release_endpoint(endpoint)


def test_asking_makes_no_watchdog():
    registry = Registry()
    assert registry.watchdog_still() is None
    assert registry._watchdog is None
    assert health.STILL > 2 * 5, "it turns every 5 s"
