"""A saturated machine is not a fault: twenty busy loops, little memory left, the GIL held for ten seconds at a time.

``--soak SECONDS`` makes it long (nox -s soak; an hour with ``-- --soak 3600``), with the default hang_timeout. By default
there are few loops and short calls: a machine that runs other tests too has to get through it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from kits.contract.gilkit import compute

import multiworld as mw

SIZE = 3
LOOPS = 20
SPIN = "while :; do :; done"
log = logging.getLogger("measured")


def available():
    """Bytes of memory that can be had without swapping."""
    (line,) = [
        each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemAvailable")
    ]
    return int(line.split()[1]) * 1024


def press(share):
    """Use memory, and go on using it, for as long as the parent lives."""
    with mmap.mmap(-1, int(available() * share)) as memory:
        while os.getppid() != 1:
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1
            time.sleep(0.1)


def works(me, seconds, hold, hang):
    heard = []
    mw.subscribe(lambda event: heard.append(event) if isinstance(event, mw.MemberBusy) else None)
    worlds = [mw.join(name, me.rank, SIZE, store=me.store, timeout=180, **hang) for name in ("busy", "quiet")]
    worlds[0].barrier()
    longest, stop = [0.0], threading.Event()

    def holds():
        while not stop.wait(1.0 + me.rank):
            longest[0] = max(longest[0], compute(hold))

    holder = threading.Thread(target=holds, daemon=True)
    holder.start()
    end, going, count = time.monotonic() + seconds, torch.ones(1), 0
    while going.item():
        going[0] = float(time.monotonic() < end)
        worlds[0].broadcast(going, 0)
        count += 1
    stop.set()
    holder.join(120)
    worlds[1].barrier()
    me.emit(
        "done",
        count=count,
        longest=longest[0],
        busy=sum(event.busy for event in heard),
        breakages=[world.breakage for world in worlds],
    )
    me.hear()
    for world in worlds:
        world.close()


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
def test_a_saturated_machine_is_no_fault(cast, soak_seconds):
    long = soak_seconds > 60
    seconds = max(12.0, soak_seconds)
    hold, hang = (10.0, {}) if long else (8.0, {"hang_timeout": 6})
    with contextlib.ExitStack() as stack:
        for _ in range(LOOPS if long else 1):
            spinner = subprocess.Popen(["sh", "-c", SPIN])
            stack.callback(spinner.wait)
            stack.callback(spinner.kill)
        if long:
            presser = cast.start(presses, SIZE, share=0.8 if soak_seconds >= 3600 else 0.3)
            stack.callback(os.kill, presser.process.pid, signal.SIGKILL)
        members = [cast.start(works, rank, seconds=seconds, hold=hold, hang=hang) for rank in range(SIZE)]
        for member in members:
            done = member.expect("done", timeout=seconds + 600)
            log.info(
                "rank %d: %d rounds, the GIL held for at most %.1f s, %d times another was busy",
                member.rank, done.count, done.longest, done.busy,
            )  # fmt: skip
            assert done.breakages == [None, None]
        for member in members:
            member.say("close")
        assert [member.finish(120) for member in members] == [0] * SIZE


def presses(me, share):
    press(share)
