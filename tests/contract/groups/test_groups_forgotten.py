"""What `multiworld._c10d.gloo.unblocking` and `cxx` rely on: gloo's threads, works and buffers are found, and only those."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from contextlib import closing, contextmanager

import torch
import torch.distributed as dist
from kits.contract.groupkit import run, soon
from kits.descriptorkit import no_descriptor
from kits.meetkit import until

import multiworld as mw
from multiworld._c10d import waiter_pool
from multiworld._c10d.gloo import cxx, unblocking
from multiworld._c10d.routing import router

TIMEOUT = 60.0
"""Seconds after which an operation ends that is forgotten."""

MANY = 16 << 20
"""Numbers: the message is half sent when its receiver stops."""


def known(member):
    """What is found of a group with a sub-group, and of works that are under way."""
    group = member.build("w")
    router.enter(group.state)
    dist.new_group([0, 1])
    targets = [each.target for each in group.state.gloo.groups()]
    peer = 1 - member.rank
    tensor = torch.ones(4)
    with closing(cxx.Memory()) as memory:
        receive = dist.irecv(torch.zeros(4), peer)
        buffers = [cxx.buffer_at(memory, receive)]
        member.meet("posted")
        send = dist.isend(tensor, peer)
        buffers.append(cxx.buffer_at(memory, send))
        others = [cxx.buffer_at(memory, work) for work in (dist.all_reduce(tensor, async_op=True),)]
        nowhere = memory.words(8, 8), memory.words(1 << 63, 8)
    for work in (receive, send):
        work.wait()
    seen = {
        "workers": [len(each.workers) for each in targets],
        "mine": len({worker for each in targets for worker in each.workers}),
        "threads": {worker.thread for each in targets for worker in each.workers} <= unblocking.threads(),
        "buffers": [buffer != 0 for buffer in buffers],
        "others": others,
        "nowhere": nowhere,
    }
    member.meet("seen")
    router.leave()
    group.close(soon())
    return seen


def test_threads_and_buffers_are_found():
    for seen in run(2, known):
        assert seen["workers"] == [2, 2]
        assert seen["mine"] == 4
        assert seen["threads"]
        assert seen["buffers"] == [True, True]
        assert seen["others"] == [0]  # a collective's buffer is no part of its work
        assert seen["nowhere"] == ([], [])


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def hidden(member):
    """A build that exports nothing: worlds work, and a warning says once what is missing."""
    cxx.usable = lambda: False
    records = Records()
    logging.getLogger("multiworld").addHandler(records)
    for name in ("a", "b"):
        group = member.build(name)
        tensor = torch.ones(1)
        router.enter(group.state)
        dist.all_reduce(tensor)
        assert tensor.item() == 2.0
        member.meet(name)
        router.leave()
        group.close(soon())
    return [text for text in records.texts if "gloo" in text]


def test_a_build_that_hides_them_is_said_once():
    for texts in run(2, hidden):
        assert len(texts) == 1
        assert "ends at its timeout" in texts[0]


def half_received(me, w):
    """Wait for a message in gloo, to be stopped when others know that."""
    work = w.broadcast(torch.ones(MANY), 0, async_op=True)
    (group,) = w._gen.c10d.gloo.groups()
    until(
        lambda: any(
            unblocking._buffer_around(unblocking._waits_at(each.thread)) for each in group.target.workers
        )
    )
    me.emit("ready")
    me.hear()
    del work


def half_sends(me, size, hinder):
    """Rank 0 has sent half of a message when its receiver is stopped; `hinder` is its context, given the world."""
    os.environ["M8D_LANE"] = "0"
    w = mw.join("w1", me.rank, size, store=me.store, timeout=TIMEOUT, hang_timeout=4)
    w.barrier()
    if me.rank:
        half_received(me, w)
        return
    with hinder(w) as refusals:
        me.emit("ready")
        me.hear()
        try:
            w.broadcast(torch.ones(MANY), 0)
        except mw.BrokenWorldException as error:
            late = time.monotonic() - w.breakage.at
            me.emit("raised", cause=error.cause, late=late, refusals=sorted(set(refusals or ())))
    w.close()


def crowded(_):
    """No descriptor is free but those that end with the world."""
    return no_descriptor()


@contextmanager
def starved(w):
    """Each thing gets a descriptor only some looks after the end."""
    refusals = []

    def at_first_without(made):
        left = iter(range(3))

        def tries(*args):
            if w.state is mw.State.BROKEN and next(left, None) is not None:
                refusals.append(made.__name__)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return made(*args)

        return tries

    cxx.Memory = at_first_without(cxx.Memory)
    unblocking._start_of = at_first_without(unblocking._start_of)
    yield refusals


@contextmanager
def beside_blocked_threads(_):
    """All threads for what is awaited are taken, by other worlds for instance."""
    over = threading.Event()
    waiter_pool.pool._limit = 1
    waiter_pool.pool.run(lambda: over.wait() and None)
    yield
    over.set()


def half_sent(cast, hinder):
    members = cast.all(half_sends, 2, hinder=hinder)
    for each in members:
        each.expect("ready")
    members[1].stop()
    members[0].say("go")
    told = members[0].expect("raised", timeout=1.5 * TIMEOUT)
    assert (told.cause, told.late < TIMEOUT / 4) == ("hung", True), told
    assert members[0].finish() == 0
    return told


def test_operations_raise_without_a_free_descriptor(cast):
    half_sent(cast, crowded)


def test_what_gloo_forgets_ends_once_a_descriptor_is_free(cast):
    assert half_sent(cast, starved).refusals == ["Memory", "_start_of"]


def test_what_gloo_forgets_ends_beside_others_blocked_operations(cast):
    half_sent(cast, beside_blocked_threads)
