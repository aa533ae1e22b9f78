"""A member whose threads all wait for the GIL is busy as long as one of them runs, and hung where none does."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from kits.contract.gilkit import compute, sleeps
from kits.contract.runningkit import Stalls
from kits.contract.worldkit import HANG, PATIENCE, SOON, left_over
from kits.meetkit import until

import multiworld as mw
from multiworld._core.liveness import busy_or_hung, detector

LATEST = 1.2 + detector._STALL_SHARE
"""Of the hang timeout: one beat, and what the verdict is put off by where the member that waits has stood still."""


def pickles(seconds):
    """Hold the GIL in C: a pickle of many objects is one call."""
    start = time.monotonic()
    objects = [{"a": i} for i in range(1_000_000)]
    while time.monotonic() - start < seconds:
        pickle.dumps(objects * 3)
    return time.monotonic() - start


def holds(me, hang, how, seconds):
    world = mw.join("w", me.rank, 2, store=me.store, timeout=120, hang_timeout=hang)
    world.barrier()
    until(children)
    time.sleep(1.0)  # its helper starts
    me.emit("holds")
    took = how(seconds)
    me.emit("held", seconds=took)
    world.barrier()
    me.hear()
    assert world.close()


def watches(me, hang, lasting=False):
    """`lasting`: what the host says once, that the member runs, holds until its bound: the host may be late."""
    if lasting:
        busy_or_hung._FRESH = PATIENCE
    heard, stalls = [], Stalls()
    mw.subscribe(lambda event: heard.append(event) if isinstance(event, mw.MemberBusy) else None)
    world = mw.join("w", me.rank, 2, store=me.store, timeout=120, hang_timeout=hang)
    world.barrier()
    seen = set()
    done = threading.Event()

    def look():
        while not done.wait(0.01):
            seen.add(world.busy)

    threading.Thread(target=look, daemon=True).start()
    try:
        world.barrier()
    except mw.BrokenWorldException as broken:
        told = {"cause": broken.cause, "ranks": broken.ranks, "detail": broken.detail, "busy": len(heard)}
        me.emit("broken", **told, stalled=stalls.since(0.0))
    else:
        until(lambda: world.busy == () and len(heard) % 2 == 0)
        done.set()
        told = [(event.ranks, event.busy) for event in heard]
        me.emit("whole", told=told, seen=sorted(seen), busy=world.busy, state=world.state)
    me.hear()
    world.close()


@pytest.mark.parametrize("how", [compute, pickles])
def test_who_computes_with_the_gil_is_busy_and_answers_again(how, cast):
    holder = cast.start(holds, 0, hang=1.5, how=how, seconds=5.0)
    other = cast.start(watches, 1, hang=1.5, lasting=True)
    held = holder.expect("held").seconds
    assert held > 3.0
    whole = other.expect("whole")
    assert whole.state == mw.State.ACTIVE
    if how is compute:  # the other one gives it back now and then
        # Between two of its calls it may be heard, where this machine lets its other threads run then.
        assert whole.told
        assert whole.told == [((0,), True), ((0,), False)] * (len(whole.told) // 2)
        assert whole.seen == [(), (0,)]
    assert whole.busy == ()
    for each in (holder, other):
        each.say("end")
        assert each.finish() == 0


def test_who_holds_the_gil_and_uses_no_core_is_hung(cast):
    holder = cast.start(holds, 0, hang=HANG, how=sleeps, seconds=4 * HANG)
    other = cast.start(watches, 1, hang=HANG)
    start = holder.expect("holds").at
    broken = other.expect("broken")
    assert (broken.cause, broken.ranks) == ("hung", (0,))
    assert broken.busy <= 1  # before it held the GIL it may have waited for its turn, which is work
    assert broken.detail.endswith("; none of its threads runs")
    # Work that its host has seen puts the verdict off.
    assert 0.8 * HANG <= broken.at - start <= LATEST * HANG * (1 + broken.busy) + 1.0 + 2 * broken.stalled
    other.say("end")
    assert other.finish() == 0


def test_who_is_stopped_is_hung_and_that_is_said(cast):
    holder = cast.start(holds, 0, hang=HANG, how=time.sleep, seconds=PATIENCE)
    other = cast.start(watches, 1, hang=HANG)
    holder.expect("holds")
    at = holder.stop()
    broken = other.expect("broken")
    assert (broken.cause, broken.ranks) == ("hung", (0,))
    assert broken.detail.endswith("; it is stopped")
    assert 0.8 * HANG <= broken.at - at <= LATEST * HANG + 0.5 + 2 * broken.stalled
    other.say("end")
    assert other.finish() == 0


def test_who_is_stopped_while_it_is_busy_is_hung_then(cast):
    holder = cast.start(holds, 0, hang=2.0, how=compute, seconds=PATIENCE)
    other = cast.start(watches, 1, hang=2.0)
    holder.expect("holds")
    time.sleep(5.0)
    at = holder.stop()
    broken = other.expect("broken")
    assert (broken.cause, broken.ranks) == ("hung", (0,))
    # Between two of its calls it may be heard, where this machine lets its other threads run then.
    assert broken.busy >= 1
    assert broken.at - at <= 2.0 + (LATEST - 1.2) * 2.0 + 2 * broken.stalled
    other.say("end")
    assert other.finish() == 0


@pytest.mark.parametrize(("bound", "least"), [("4", 4.0), ("0", 1.2)])
def test_who_is_busy_for_longer_than_the_bound_is_hung(bound, least, cast):
    holder = cast.start(holds, 0, hang=1.5, how=compute, seconds=PATIENCE)
    other = cast.start(bounded, 1, hang=1.5, bound=bound)
    at = holder.expect("holds").at
    broken = other.expect("broken")
    assert (broken.cause, broken.ranks) == ("hung", (0,))
    assert (broken.busy > 0) is (bound != "0")
    assert least <= broken.at - at <= least + SOON / 3
    other.say("end")
    assert other.finish() == 0


def bounded(me, hang, bound):
    os.environ["M8D_BUSY_TIMEOUT"] = bound
    watches(me, hang, lasting=True)


def children():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += [int(each) for each in (task / "children").read_text().split()]
    return found


def helped(me):
    before = left_over()
    world = mw.join("w", me.rank, 2, store=me.store, timeout=60)
    deadline = time.monotonic() + PATIENCE
    while not children() and time.monotonic() < deadline:
        time.sleep(0.02)
    me.emit("started", pids=children())
    me.hear()
    world.close()
    while children() and time.monotonic() < deadline:
        time.sleep(0.02)
    me.emit("closed", pids=children(), fds=left_over()["fds"] - before["fds"])
    me.hear()


def alone(me):
    with mw.join("w", 0, 1, store=me.store, timeout=60):
        time.sleep(0.6)
        me.emit("alone", pids=children())


def test_who_is_alone_has_no_helper(cast):
    member = cast.start(alone, 0)
    assert member.expect("alone").pids == []
    assert member.finish() == 0


def gone(pid):
    return not Path(f"/proc/{pid}").exists()


def test_the_helper_ends_with_its_world_and_with_its_process(cast):
    members = cast.start(helped, 0), cast.start(helped, 1)
    pids = [each.expect("started").pids for each in members]
    assert [len(each) for each in pids] == [1, 1]
    command = Path(f"/proc/{pids[0][0]}/cmdline").read_bytes()
    assert command.rstrip(b"\0").endswith(b"evidence_program.py")
    members[1].kill()
    deadline = time.monotonic() + PATIENCE
    while not gone(pids[1][0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pids[1][0])
    members[0].say("close")
    assert members[0].expect("closed").pids == []
    members[0].say("end")
    assert members[0].finish() == 0


def test_a_process_that_computes_without_the_gil_beats_all_the_time(cast):
    holder = cast.start(holds, 0, hang=HANG, how=multiplies, seconds=2 * HANG)
    other = cast.start(watches, 1, hang=HANG)
    assert other.expect("whole").told == []
    for each in (holder, other):
        each.say("end")
        assert each.finish() == 0


def multiplies(seconds):
    start, tensor = time.monotonic(), torch.ones(600, 600)
    while time.monotonic() - start < seconds:
        tensor = (tensor @ tensor) * 0
    return seconds
