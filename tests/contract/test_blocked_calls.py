"""`WorldUnblocked`: told of each kind of call that a lost member left blocked."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from worldkit import HANG, PATIENCE, outcome

import multiworld as mw
from multiworld.events import WorldUnblocked


def selected(w):
    with w:
        dist.all_reduce(torch.ones(3))


def posted(w):
    w.all_reduce(torch.ones(3), async_op=True).wait()


CALLS = {
    "recv": lambda w: w.recv(torch.ones(3), 1),
    "all_reduce": lambda w: w.all_reduce(torch.ones(3)),
    "posted": posted,
    "selected": selected,
}


def blocked(me, size, how, lane):
    """Rank 0 is in a call that rank 1 never answers."""
    os.environ["M8D_LANE"] = lane
    w = mw.join("w", me.rank, size, store=me.store, timeout=60, hang_timeout=HANG)
    told, calls = threading.Event(), []

    def hear(event):
        if isinstance(event, WorldUnblocked):
            calls.append(event.calls)
            told.set()

    def say_that_it_waits():
        log = w._gen.operations.log
        while not log.waiting(time.monotonic()):
            time.sleep(0.01)
        me.emit("waits")

    mw.subscribe(hear)
    w.barrier()
    me.emit("in")
    if me.rank:
        me.hear()
    threading.Thread(target=say_that_it_waits, daemon=True).start()
    ended = outcome(lambda: CALLS[how](w))
    me.emit("over", **ended, told=told.wait(PATIENCE), calls=calls)
    w.close()


@pytest.mark.parametrize("lane", ["1", "0"])
@pytest.mark.parametrize("how", CALLS)
def test_it_is_told_of_a_call_that_has_raised(cast, how, lane):
    waits, lost = cast.all(blocked, 2, how=how, lane=lane)
    for each in (waits, lost):
        each.expect("in")
    waits.expect("waits")
    os.kill(lost.process.pid, signal.SIGKILL)
    over = waits.expect("over")
    assert "BrokenWorldException" in over.kinds
    assert (over.told, over.calls) == (True, [1]), over
    assert waits.finish() == 0
