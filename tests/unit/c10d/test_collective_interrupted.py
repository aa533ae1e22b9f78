"""A collective that a signal's handler ends, wherever it stands: it goes on, was not called, or ends the world."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest
import torch
from kits import collectivekit
from kits.collectivekit import PATIENCE
from kits.signalkit import At, Interrupted

from multiworld._c10d.lane import collective, reducing
from multiworld._c10d.lane.collective_dispatch import GroupCollectives, Limits
from multiworld._core.lane import schedules
from multiworld._net.lane.awaiting import Watch
from multiworld._net.lane.background import background

FILES = {collective.__file__, schedules.__file__}
NUMBERS = GroupCollectives._number.__code__


def over(begun):
    deadline = time.monotonic() + PATIENCE
    while not begun.done:
        assert time.monotonic() < deadline, "it waits for ever"
        time.sleep(0.001)


CALLS = {
    "all_gather": lambda of, outs: of.all_gather(outs, torch.full((2,), of.rank + 1.0)),
    "all_reduce in pieces": lambda of, outs: of.all_reduce(outs[0]),
    "barrier": lambda of, outs: of.barrier(),
}
EXPECTED = {"all_gather": [1.0, 2.0], "all_reduce in pieces": [2.0, 0.0], "barrier": [0.0, 0.0]}


def rooms(name):
    if name == "all_reduce in pieces":
        return [torch.ones(10), torch.zeros(1)]
    return [torch.zeros(2), torch.zeros(2)]


def posted(made):
    made.begin()


def waited(made):
    made.wait()


def posted_and_waited(made):
    made.begin()
    made.wait()


def awaited(made):
    async def main():
        await made.awaited(Watch(made.endpoint, asyncio.get_running_loop()))

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        sys.settrace(None)
        loop.close()


def interrupted_at(at, name, way):
    """Return whether there was an instruction with this number."""
    with collectivekit.pair(limits=Limits(whole=0)) as (mine, others):
        outs, theirs, made = rooms(name), rooms(name), []
        other = threading.Thread(target=lambda: CALLS[name](others, theirs).wait(), daemon=True)
        other.start()
        signalled = At(at, FILES, NUMBERS)
        try:
            with signalled:
                made.append(CALLS[name](mine, outs))
                way(made[0])
        except Interrupted:
            if not made or made[0].tag < 0:  # as if it had not been called
                outs = rooms(name)
                made[:] = [CALLS[name](mine, outs)]
                made[0].wait()
        over(made[0])
        if made[0].error is not None:
            assert "was interrupted" in str(made[0].error)
            return signalled.left <= 0
        other.join(PATIENCE)
        for _ in range(2):  # and those that follow have their own values
            values = torch.zeros(3), torch.full((3,), 5.0)
            sending = threading.Thread(target=others.broadcast(values[1], 1).wait, daemon=True)
            sending.start()
            mine.broadcast(values[0], 1).wait()
            sending.join(PATIENCE)
            assert torch.equal(*values)
        for each in (outs, theirs):
            assert [float(out.min()) for out in each] == EXPECTED[name] == [float(out.max()) for out in each]
        return signalled.left <= 0


@pytest.mark.parametrize("way", [posted, waited, posted_and_waited, awaited])
@pytest.mark.parametrize("name", list(CALLS))
def test_a_signal_at_each_instruction(monkeypatch, name, way):
    monkeypatch.setattr(reducing, "PIECE", 8)  # two elements: each member has three pieces
    at = 1
    while interrupted_at(at, name, way):
        at += 7 if "pieces" in name else 1  # it has thousands
    assert at > 50
    background.dismiss()
