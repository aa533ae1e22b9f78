"""Real processes, really killed, stopped and forked.

Where nobody hangs, hang_timeout is so long that a machine that stands still for seconds is no fault, and that a
crash is seen by other signs in time.
"""

from __future__ import annotations

import os
import signal
import statistics
import time

import pytest
from watchkit import PATIENCE, SLACK, Family, join, members


@pytest.fixture
def family():
    with Family() as found:
        yield found


def test_a_killed_member_is_crashed_for_everyone(family):
    children = family.born(4)
    join(children)
    join([children[0], children[1]], "other")
    children[3].send_signal(signal.SIGKILL)
    for child in children[:3]:
        verdict = child.wait("verdict")
        assert (verdict["world"], verdict["cause"], verdict["ranks"]) == ("w", "crashed", [3])
    for child in children[:2]:
        child.quiet("verdict", 0.3)


def test_several_killed_at_once_are_all_named_or_the_first_seen(family):
    children = family.born(5)
    join(children)
    for child in children[3:]:
        child.send_signal(signal.SIGKILL)
    for child in children[:3]:
        verdict = child.wait("verdict")
        assert verdict["cause"] == "crashed"
        assert verdict["ranks"]
        assert set(verdict["ranks"]) <= {3, 4}


def test_the_median_of_crashes_is_short(family):
    # A few milliseconds, measured. The bound only tells that nobody waits for a time to pass: one stall, or two,
    # do not move a median.
    [watcher] = family.born(1)
    delays = []
    for number in range(8):
        [victim] = family.born(1)
        join([watcher, victim], f"w{number}")
        killed = victim.send_signal(signal.SIGKILL)
        delays.append(watcher.wait("verdict")["at"] - killed)
        watcher.call("leave", world=f"w{number}")
        watcher.wait("left")
    assert statistics.median(delays) < 1.0, delays


def test_a_stopped_member_is_hung_and_learns_of_it_when_it_goes_on(family):
    children = family.born(3)
    hang = 4.0  # a stall of the two others that is longer is a hang too
    join(children, hang=hang)
    stopped = children[1].send_signal(signal.SIGSTOP)
    for child in (children[0], children[2]):
        verdict = child.wait("verdict")
        assert (verdict["cause"], verdict["ranks"]) == ("hung", [1])
        # Counted from the last sign of life, which a stalled machine may have kept from being sent.
        assert 0.25 * hang <= verdict["at"] - stopped <= 1.2 * hang + SLACK
    children[1].send_signal(signal.SIGCONT)
    verdict = children[1].wait("verdict")
    assert (verdict["cause"], verdict["ranks"]) == ("hung", [1])


def test_a_short_stop_is_no_verdict(family):
    children = family.born(2)
    join(children, hang=6.0)
    children[1].send_signal(signal.SIGSTOP)
    time.sleep(2.0)  # less than the timeout, even where this process stalls: what is tested
    children[1].send_signal(signal.SIGCONT)
    for child in children:
        child.quiet("verdict", 0.5)


def test_leaving_is_left_for_the_others_and_nothing_for_the_leaver(family):
    children = family.born(3)
    join(children)
    join(children, "other")
    children[2].call("leave", world="w")
    children[2].wait("left")
    for child in children[:2]:
        verdict = child.wait("verdict")
        assert (verdict["world"], verdict["cause"], verdict["ranks"]) == ("w", "left", [2])
    for child in children:
        child.quiet("verdict", 0.3)


def test_a_failed_operation_is_failed_unless_somebody_crashed(family):
    children = family.born(3)
    join(children)
    join(children, "other")
    asked = time.monotonic()
    children[0].call("report", world="w", detail="the wire is cut", ranks=[2])
    found = children[0].wait("reported")
    assert (found["cause"], found["ranks"], found["detail"]) == ("failed", [2], "at rank 0: the wire is cut")
    assert found["at"] - asked >= 0.4, "it did not wait for a better reason"
    for child in children:
        verdict = child.wait("verdict")
        assert (verdict["world"], verdict["cause"], verdict["detail"]) == (
            "w",
            "failed",
            "at rank 0: the wire is cut",
        )
    children[2].send_signal(signal.SIGKILL)
    children[2].process.wait(PATIENCE)  # its kernel may take longer to end it than a report is held back
    children[0].call("report", world="other", detail="closed by rank 1", ranks=[1])
    found = children[0].wait("reported")
    assert (found["cause"], found["ranks"]) == ("crashed", [2])


def test_an_old_generation_is_told_so(family):
    children = family.born(2)
    join(children)
    join(children, "keep")
    for child in children:
        child.call("leave", world="w")
        child.wait("left")
    everyone = members(children)
    for rank, child in enumerate(children):
        generation = 1 + rank
        child.call(
            "attach", world="w", generation=generation, rank=rank, members=everyone,
            token=f"{generation:032x}", hang=PATIENCE, timeout=4.0 if rank else PATIENCE,
        )  # fmt: skip
    refused = children[0].wait("refused")
    assert refused["error"] == "StaleGenerationError"
    assert "rank 1 is in generation 2" in refused["text"]
    late = children[1].wait("refused")
    assert late["error"] in {"JoinTimeoutError", "JoinAbandonedError"}
    assert "rank 0" in late["text"]


def test_a_copy_of_the_connection_in_a_forked_child_hides_no_crash(family):
    children = family.born(2)
    join(children)
    children[1].call("fork", seconds=4 * PATIENCE)
    forked = children[1].wait("forked")["pid"]
    try:
        children[1].send_signal(signal.SIGKILL)
        assert children[0].wait("verdict")["cause"] == "crashed"
    finally:
        os.kill(forked, signal.SIGKILL)


def test_sixty_worlds_in_different_orders_share_one_connection(family):
    children = family.born(3)
    everyone = members(children)
    names = [f"w{number}" for number in range(60)]
    for rank, child in enumerate(children):
        for name in names[:: -1 if rank % 2 else 1]:
            child.call(
                "attach",
                world=name,
                generation=1,
                rank=rank,
                members=everyone,
                token="ab" * 16,
                hang=PATIENCE,
                timeout=2 * PATIENCE,
            )
    for child in children:
        for name in names:
            child.wait("attached", 3 * PATIENCE, world=name)
        child.until_holds(connections=2, listeners=1, worlds=sorted(f"{name}/1" for name in names))
    children[2].send_signal(signal.SIGKILL)
    for child in children[:2]:
        for name in names:
            assert child.wait("verdict", world=name)["ranks"] == [2]


def test_a_process_with_a_hundred_worlds_is_idle(family):
    children = family.born(2)
    for number in range(100):
        join(children, f"w{number}")
    children[0].call("cpu")
    before = children[0].wait("cpu")
    time.sleep(3)  # the time that is measured
    children[0].call("cpu")
    after = children[0].wait("cpu")
    share = (after["seconds"] - before["seconds"]) / (after["at"] - before["at"])
    assert share < 0.05, f"{share:.2%} of a core"


def test_nothing_is_left_after_the_last_world(family):
    children = family.born(2)
    join(children)
    for child in children:
        child.call("leave", world="w")
        child.wait("left")
        child.call("close", host=child.hello["host"], port=child.hello["port"])
        child.wait("closed")
    for child in children:
        # Files: the standard streams, and the folder that is listed.
        child.until_holds(thread=False, listeners=0, connections=0, threads=1, tasks=1, files=4)


def test_threads_that_keep_the_gil_for_a_second_are_no_fault(family):
    children = family.born(2)
    join(children, hang=8.0)
    for child in children:
        child.call("hog", threads=1)
        child.wait("hogging")
    time.sleep(10)  # the time that is tested
    for child in children:
        child.quiet("verdict", 0.1)
