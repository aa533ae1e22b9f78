"""A world that loses, stops, dismisses and takes in members at random, and loses its store: benchmarks/chaos.

Every sum is right, the state is that of the step, it always goes on, and no other world of its members breaks.
``--soak SECONDS`` makes it long (nox -s soak: 300 s); by default it takes a quarter of a minute.
"""

from __future__ import annotations

import time

import pytest
from kits.contract.worldkit import HANG, PATIENCE

from benchmarks.chaos.crowd import MOST
from benchmarks.chaos.part import rate
from benchmarks.measuring.ranks import Ranks

pytestmark = [pytest.mark.everyday, pytest.mark.soak]

EVERY = 1.0  # seconds between two faults


def test_a_world_that_changes_all_the_time(request):
    seconds = request.config.getoption("--soak")
    with Ranks("benchmarks.chaos.crowd:make", count=1) as (crowd,):
        crowd.call("begin", timeout=2 * PATIENCE, members=4, hang_timeout=HANG, seed=0)
        end, happened = time.monotonic() + seconds, []
        while time.monotonic() < end:
            happened.append(crowd.call("fault", timeout=PATIENCE))
            crowd.call("wait", timeout=PATIENCE, seconds=EVERY)
        crowd.call("settle", timeout=2 * PATIENCE, members=5)
        told = crowd.call("reports")
        crowd.call("end")
    assert told["broken"] == [], happened
    assert told["reformed"], happened
    assert rate(told["track"]) > 0, "and it did not begin anew"
    assert told["more_descriptors"] <= 4 * MOST
