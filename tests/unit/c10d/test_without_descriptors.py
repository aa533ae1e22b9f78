"""Blocking calls in a thread for which the process has no descriptor left: none has begun what it refuses."""

from __future__ import annotations

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kits import collectivekit
from kits.collectivekit import PATIENCE
from kits.lanekit import InHandler

from multiworld._c10d.lane import records
from multiworld._c10d.lane.messages import Messages
from multiworld._core.operations.log import OperationLog
from multiworld._net.lane.endpoint import Endpoint
from multiworld._net.lane.wakes import NoDescriptorError

MB = 1 << 20


def refuses(monkeypatch, call):
    """Let `call` be made without a descriptor, in a thread that has none."""

    def refused(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr(os, "eventfd", refused)
        with pytest.raises(NoDescriptorError, match="call it again"):
            thread.submit(call).result(PATIENCE)


def test_a_collective_that_is_called_again_is_the_same_one(monkeypatch):
    with collectivekit.pair() as (mine, others):
        values, theirs = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])
        first = mine.all_reduce(values[0])
        refuses(monkeypatch, first.wait)
        assert (first.done, first.tag) == (False, -1)
        with ThreadPoolExecutor(1) as thread:
            over = thread.submit(lambda: [others.all_reduce(each).wait() for each in theirs])
            for each in values:
                mine.all_reduce(each).wait()
            over.result(PATIENCE)
        assert values.tolist() == theirs.tolist() == [[11.0], [22.0]]


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    made = Endpoint({1: one}), Endpoint({0: other})
    yield made
    for each in made:
        each.fail(ConnectionError("the test is over"))


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("size", [8, MB])
def test_a_send_that_is_called_again_is_one_message(monkeypatch, ends, size, profiled):
    mine, theirs = (
        Messages(end, "w", PATIENCE, lambda error: error, OperationLog(rank, 2))
        for rank, end in enumerate(ends)
    )
    sent = [torch.full((size,), number, dtype=torch.uint8) for number in (1, 2)]
    with monkeypatch.context() as patch:
        if profiled:
            patch.setattr("multiworld._c10d.lane.messages._profiled", lambda: True)
            patch.setattr(records, "begin", lambda *_: None)
        refuses(monkeypatch, lambda: mine.send(sent[0], 1))
        if profiled:
            refuses(monkeypatch, lambda: theirs.receive(torch.zeros(size), 0))
    with ThreadPoolExecutor(1) as thread:
        over = thread.submit(lambda: [mine.send(each, 1) for each in sent])
        for each in sent:
            theirs.receive(got := torch.zeros_like(each), 0)
            assert torch.equal(got, each)
        over.result(PATIENCE)


@pytest.mark.parametrize("profiled", [False, True])
def test_a_handler_sends_a_small_message(monkeypatch, ends, profiled):
    mine, theirs = (
        Messages(end, "w", PATIENCE, lambda error: error, OperationLog(rank, 2))
        for rank, end in enumerate(ends)
    )
    if profiled:
        monkeypatch.setattr("multiworld._c10d.lane.messages._profiled", lambda: True)
        monkeypatch.setattr(records, "begin", lambda *_: None)

    def handler():
        mine.send(torch.ones(2), 1)
        theirs.send(torch.zeros(2), 0)

    InHandler(ends[0], handler)
    mine.receive(torch.ones(2), 1)
    theirs.receive(got := torch.zeros(2), 0)
    assert got.tolist() == [1, 1]
