"""M8D_CHECK=1: a call that a signal's handler interrupts, wherever it stands: it goes on, or was not called."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from kits import collectivekit
from kits.collectivekit import PATIENCE
from kits.lanekit import InHandler
from kits.meetkit import until
from kits.signalkit import At, Interrupted
from test_collective_refused import checking

from multiworld._c10d.lane import collectives
from multiworld._c10d.waiter_pool import pool
from multiworld._net.lane.background import background

FILES = {collectives.__file__}


@pytest.fixture(autouse=True)
def no_threads_stay():
    yield
    background.dismiss()
    pool.dismiss()


class Member:
    """One that compares its calls; it remembers its comparisons."""

    def __init__(self, of):
        self._made, self._group = checking(of)
        self.exchanges, exchange = [], self._made.default.exchange

        def remembered(record):
            self.exchanges.append(exchange(record))
            return self.exchanges[-1]

        self._made.default.exchange = remembered

    def all_reduce(self, tensor):
        return self._made.posted("allreduce", self._group, ([tensor], dist.AllreduceOptions()), {})


def right(mine, theirs, values, call):
    """`call` was interrupted, or not: all that both members call has its own values."""
    others = torch.tensor([[10.0], [20.0], [30.0]])
    with ThreadPoolExecutor(1) as thread:
        over = thread.submit(lambda: [theirs.all_reduce(each).wait() for each in others])
        try:
            call()
        except Interrupted:
            if not mine.exchanges or mine.exchanges[0].tag < 0:
                mine.all_reduce(values[0])
        for each in values[1:]:
            mine.all_reduce(each).wait()
        over.result(PATIENCE)
    expected = [[11.0], [22.0], [33.0]]
    until(lambda: values.tolist() == expected)
    assert others.tolist() == expected


def interrupted_at(at):
    """Return whether there was an instruction with this number."""
    with collectivekit.pair() as pair:
        values = torch.tensor([[1.0], [2.0], [3.0]])
        mine, theirs = map(Member, pair)
        signalled = At(at, FILES)

        def call():
            with signalled:
                mine.all_reduce(values[0])

        right(mine, theirs, values, call)
        return signalled.left <= 0


def test_a_signal_at_each_instruction():
    at = 1
    while interrupted_at(at):
        at += 3
    assert at > 50


def test_a_signal_while_the_others_have_not_called(monkeypatch):
    with collectivekit.pair() as pair:
        values = torch.tensor([[1.0], [2.0], [3.0]])
        mine, theirs = map(Member, pair)
        look = pair[0]._endpoint._look

        def interrupted(deadline):
            if threading.current_thread() is threading.main_thread():  # no handler runs in those that go on
                raise Interrupted
            return look(deadline)

        with monkeypatch.context() as patch:
            patch.setattr(pair[0]._endpoint, "_look", interrupted)
            with pytest.raises(Interrupted):
                mine.all_reduce(values[0])
        right(mine, theirs, values, lambda: None)


@pytest.mark.parametrize("leads", [True, False], ids=["its thread leads", "another thread leads"])
def test_a_handler_that_compares_in_the_middle_of_a_comparison_is_refused(leads):
    """It would wait for the call that it interrupts, until the timeout."""
    with collectivekit.pair() as pair:
        mine, theirs = map(Member, pair)
        end, raised = pair[0]._endpoint, []
        given = torch.tensor([[1.0], [2.0]])

        def handler():
            with pytest.raises(RuntimeError, match="a signal's handler called an operation") as seen:
                mine.all_reduce(given[1])
            raised.append(seen.value)

        conclude = mine._made.conclude

        def interrupted(exchange):
            mine._made.conclude = conclude
            handler()
            conclude(exchange)

        if leads:
            InHandler(end, handler)
        else:
            mine._made.conclude = interrupted
        others = torch.tensor([[10.0], [20.0]])
        with ThreadPoolExecutor(1) as thread:
            over = thread.submit(lambda: [theirs.all_reduce(each).wait() for each in others])
            for each in given:
                mine.all_reduce(each).wait()
            over.result(PATIENCE)
        assert len(raised) == 1
        assert given.tolist() == others.tolist() == [[11.0], [22.0]]
