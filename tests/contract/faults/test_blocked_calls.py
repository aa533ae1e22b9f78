"""`WorldUnblocked`: told of methods and collectives that a lost member left blocked."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kits.contract.worldkit import HANG, PATIENCE, outcome

import multiworld as mw
from multiworld._core.operations.log import ENDED, _holds_a_caller
from multiworld.events import WorldUnblocked


def selected(w):
    with w:
        dist.all_reduce(torch.ones(3))


def posted(w):
    w.all_reduce(torch.ones(3), async_op=True).wait()


def _is_awaited(posted):
    return callable(posted) and (operation := posted()) is not None and operation.has_caller


def posted_for_two(w):
    """Another thread gives up, which breaks the world."""
    work = w.all_reduce(torch.ones(3), async_op=True)
    waits = threading.Thread(target=lambda: outcome(work.wait))
    waits.start()
    while not any(_is_awaited(each[ENDED]) for each in w._gen.operations.log.entries):
        time.sleep(0.01)
    outcome(lambda: work.wait(timedelta(seconds=0.3)))
    waits.join(PATIENCE)
    w.barrier()


CALLS = {
    "recv": lambda w: w.recv(torch.ones(3), 1),
    "all_reduce": lambda w: w.all_reduce(torch.ones(3)),
    "posted": posted,
    "posted for two": posted_for_two,
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
        while not any(_holds_a_caller(each) for each in tuple(log.entries)):  # not posted alone: it is in it
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
    if how != "posted for two":
        os.kill(lost.process.pid, signal.SIGKILL)
    over = waits.expect("over")
    assert "BrokenWorldException" in over.kinds
    assert (over.told, over.calls) == (True, [1]), over
    assert waits.finish() == 0
