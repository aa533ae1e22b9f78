"""What `multiworld._c10d.gloo.unblocking` and `cxx` rely on: gloo's threads, works and buffers are found, and only those."""

from __future__ import annotations

import logging
from contextlib import closing

import torch
import torch.distributed as dist
from groupkit import run, soon

from multiworld._c10d.gloo import cxx, unblocking
from multiworld._c10d.routing import router


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
