"""A busy machine is not a fault: both cores taken, the GIL held for a second at a time, and no verdict.

``--soak SECONDS`` makes it long (nox -s soak), with the default hang_timeout; by default it takes a quarter of a
minute, with one that is longer: the machine of a short run may be shared, and stand still for seconds itself.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

import multiworld as mw

SIZE = 3
log = logging.getLogger("measured")


def spin():
    """Take a core for as long as the parent lives."""
    while os.getppid() != 1:
        pass


def keep_the_gil(stop, pause):
    """Hold the GIL for a second, again and again: PyDLL does not give it back during a call."""
    sleep = ctypes.PyDLL(None).usleep
    while not stop.is_set():
        sleep(1_000_000)
        time.sleep(pause)


def busy(me, seconds, hogging, hang):
    w = mw.join("busy", me.rank, SIZE, store=me.store, timeout=120, **hang)
    quiet = mw.join(
        "quiet", me.rank, SIZE, store=me.store, timeout=120, **hang
    )  # a world without any traffic
    w.barrier()
    stop = threading.Event()
    hogs = [
        threading.Thread(target=keep_the_gil, args=(stop, 0.1 + 0.05 * me.rank), daemon=True)
        for _ in range(hogging)
    ]
    for hog in hogs:
        hog.start()
    me.emit("up")
    count, going = 0, torch.ones(1)
    end = time.monotonic() + seconds
    while True:
        t = torch.tensor([count, me.rank])
        w.all_reduce(t)
        assert t.tolist() == [SIZE * count, SIZE * (SIZE - 1) // 2]
        count += 1
        going[0] = float(time.monotonic() < end)
        w.broadcast(going, 0)  # rank 0 says when it is enough, for all in the same round
        if not going.item():
            break
    stop.set()
    for hog in hogs:
        hog.join(10)
    quiet.barrier()
    me.emit("done", count=count, breakages=[w.breakage, quiet.breakage])
    me.hear()
    w.close()
    quiet.close()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_busy_machine_is_no_fault(cast, soak_seconds):
    seconds = max(15.0, soak_seconds)
    hang = {} if soak_seconds > 60 else {"hang_timeout": 10}
    context = multiprocessing.get_context("forkserver")
    spinners = [context.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 2)]
    for spinner in spinners:
        spinner.start()
    try:
        members = [
            cast.start(busy, rank, seconds=seconds, hogging=1 + rank % 2, hang=hang) for rank in range(SIZE)
        ]
        for member in members:
            member.expect("up", timeout=120)
        counts = []
        for member in members:
            done = member.expect("done", timeout=seconds + 240)
            assert done.breakages == [None, None]
            counts.append(done.count)
        assert len(set(counts)) == 1
        assert counts[0] >= seconds / 20  # each step waits for whoever holds its GIL, and goes on
        log.info("%d rounds in %.0f s", counts[0], seconds)
        for member in members:
            member.say("close")
        assert [member.finish(120) for member in members] == [0] * SIZE
    finally:
        for spinner in spinners:
            os.kill(spinner.pid, signal.SIGKILL)
            spinner.join(10)
            spinner.close()
