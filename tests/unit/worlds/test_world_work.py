"""A receive that torch carries is waited for once, by however many threads."""

from __future__ import annotations

import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from multiworld.events import State
from multiworld.work import WorldWork

PATIENCE = 120.0


class Receive:
    """Waits until it is told to end; gloo waits for another message where it is waited for again."""

    def __init__(self):
        self.waits, self.begun, self.may_end = 0, threading.Event(), threading.Event()

    def wait(self, timeout=None):
        self.waits += 1
        self.begun.set()
        return self.may_end.wait(PATIENCE)


class World:
    state = State.ACTIVE

    def explain(self, error):
        return error


def test_threads_that_wait_for_one_receive_wait_for_it_once():
    receive = Receive()
    work = WorldWork(receive, World(), once=True)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(work.wait)]
        assert receive.begun.wait(PATIENCE)
        waiting += [threads.submit(work.wait, each) for each in (None, dt.timedelta(0), dt.timedelta.max)]
        with pytest.raises(TimeoutError, match="another thread waits"):
            work.wait(dt.timedelta(seconds=0.05))
        receive.may_end.set()
        assert [each.result(PATIENCE) for each in waiting] == [True] * 4
    assert work.wait()
    assert receive.waits == 1


def test_each_wait_reaches_torch_on_a_gpu():
    receive = Receive()
    receive.may_end.set()
    work = WorldWork(receive, World())
    assert work.wait()
    assert work.wait(dt.timedelta(seconds=1))
    assert receive.waits == 2
