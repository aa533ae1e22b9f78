"""Early-close connections between real processes: killed, forked, replaced, left, and where the system refuses them."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from watchkit import PATIENCE, Family, join

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux has tables of descriptors for a thread"
)


@pytest.fixture
def family():
    with Family() as found:
        yield found


def tied(children, count=None):
    """Wait until each keeps an early-close connection to each other one, and watches theirs."""
    others = len(children) - 1 if count is None else count
    for child in children:
        child.until_holds(kept=others, watched=others)


def test_a_crash_is_seen_before_the_process_has_gone(family):
    """Once, of several: which thread goes last, and frees the memory, is the kernel's to choose."""
    [watcher] = family.born(1)
    seen = []
    for number in range(15):
        [victim] = family.born(1)
        victim.call("use", megabytes=300)
        victim.wait("used")
        join([watcher, victim], f"w{number}")
        tied([watcher, victim])
        victim.send_signal(signal.SIGKILL)
        verdict = watcher.wait("verdict")
        assert (verdict["cause"], verdict["ranks"]) == ("crashed", [1])
        victim.reader.join(PATIENCE)
        seen.append(victim.ended - verdict["at"])
        if seen[-1] > 0.002:  # without an early-close connection it is later, or within microseconds
            return
        watcher.call("leave", world=f"w{number}")
        watcher.wait("left")
    pytest.fail(f"seconds from the verdict to the end of the process: {seen}")


@pytest.mark.parametrize("way", ["exit", "exec", signal.SIGSEGV, signal.SIGTERM])
def test_whatever_ends_the_process_it_has_crashed(family, way):
    children = family.born(3)
    join(children)
    join(children[1:], "other")
    tied(children)
    if isinstance(way, str):
        children[2].call(way, seconds=4 * PATIENCE)
    else:
        children[2].send_signal(way)
    for child in children[:2]:
        verdict = child.wait("verdict", world="w")
        assert (verdict["cause"], verdict["ranks"]) == ("crashed", [2])
    verdict = children[1].wait("verdict", world="other")
    assert (verdict["cause"], verdict["ranks"]) == ("crashed", [1])
    tied(children[:2])
    children[0].quiet("verdict", 0.3)


def test_a_child_that_lives_on_hides_nothing(family):
    children = family.born(2)
    join(children)
    tied(children)
    children[1].call("fork", seconds=4 * PATIENCE)
    forked = children[1].wait("forked")["pid"]
    try:
        children[1].send_signal(signal.SIGKILL)
        assert children[0].wait("verdict")["cause"] == "crashed"
        os.kill(forked, 0)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_child_that_ends_is_no_crash_of_its_parent(family):
    children = family.born(2)
    join(children)
    tied(children)
    children[1].call("fork", seconds=0)
    children[1].wait("forked")
    for child in children:
        child.quiet("verdict", 0.5)
    tied(children)


def test_a_stop_is_no_crash(family):
    children = family.born(2)
    join(children)
    tied(children)
    children[1].send_signal(signal.SIGSTOP)
    children[0].quiet("verdict", 1.0)
    children[1].send_signal(signal.SIGCONT)
    children[0].quiet("verdict", 0.2)


def test_who_leaves_and_ends_at_once_has_left(family):
    [stays] = family.born(1)
    for number in range(5):
        [leaves] = family.born(1)
        join([stays, leaves], f"w{number}")
        tied([stays, leaves])
        leaves.call("leave", world=f"w{number}")
        leaves.call("exit")
        verdict = stays.wait("verdict")
        assert (verdict["cause"], verdict["ranks"]) == ("left", [1])
        stays.call("leave", world=f"w{number}")
        stays.wait("left")
    stays.quiet("verdict", 0.3)


def test_generations_one_after_the_other_leave_nothing(family):
    children = family.born(2)
    for generation in range(1, 8):
        join(children, generation=generation, token=f"{generation:032x}")
        if generation % 2:
            tied(children)
        for child in children:
            child.call("leave", world="w")
            child.wait("left")
    for child in children:
        child.until_holds(kept=0, watched=0, connections=0, worlds=[])
        child.call("close", host=child.hello["host"], port=child.hello["port"])
        child.wait("closed")
        child.until_holds(thread=False, threads=1, tasks=1, files=4)


@pytest.mark.parametrize("refused", [[0], [1], [0, 1]])
def test_where_the_system_refuses_them_a_crash_is_seen_all_the_same(family, refused):
    children = [family.born(1, early_close=number not in refused)[0] for number in range(2)]
    join(children)
    join(children, "other")
    for number, child in enumerate(children):
        child.until_holds(kept=int(number not in refused), watched=int(1 - number not in refused))
    children[1].call("leave", world="other")
    assert children[0].wait("verdict")["cause"] == "left"
    children[1].send_signal(signal.SIGKILL)
    assert children[0].wait("verdict")["cause"] == "crashed"
    children[0].call("leave", world="w")
    children[0].call("leave", world="other")
    children[0].call("close", host=children[0].hello["host"], port=children[0].hello["port"])
    children[0].until_holds(thread=False, connections=0, threads=1, tasks=1, files=4)
