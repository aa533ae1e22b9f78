"""The end of a message whose bytes are put into the tensor by a thread that waits for it."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.lane.messages import Messages  # noqa: E402  (torch may be missing)
from multiworld._c10d.lane.work import LaneWork  # noqa: E402  (torch may be missing)
from multiworld._c10d.waiter_pool import pool  # noqa: E402  (torch may be missing)
from multiworld._core.operations.log import OperationLog  # noqa: E402  (torch may be missing)

PATIENCE = 120.0


class Over:
    """An operation that has ended well, and the messages of its world."""

    done, error = True, None

    def finish(self, operation, timeout=0.0):
        assert operation is self


def work(landed):
    over = Over()
    return LaneWork(over, over, torch.zeros(1), landed=landed)


def test_no_thread_returns_before_the_bytes_are_in_the_tensor():
    begun, may_end, landed, returned = threading.Event(), threading.Event(), [], []

    def land():
        begun.set()
        assert may_end.wait(PATIENCE)
        landed.append(True)

    waited = work(land)

    def wait():
        waited.wait()
        returned.append(bool(landed))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    threads[0].start()
    assert begun.wait(PATIENCE)
    for each in threads[1:]:
        each.start()
    threads[1].join(0.2)
    assert not returned
    may_end.set()
    for each in threads:
        each.join(PATIENCE)
    assert returned == [True] * 3
    assert landed == [True]


def test_an_interrupted_copy_is_made_by_the_next_wait():
    tried = []

    def land():
        tried.append(True)
        if len(tried) == 1:
            raise KeyboardInterrupt

    waited = work(land)
    with pytest.raises(KeyboardInterrupt):
        waited.wait()
    assert waited.wait()
    assert waited.wait()
    assert len(tried) == 2


def test_a_future_is_completed_once_whatever_interrupts_its_telling(monkeypatch):
    """The endpoint tells again what an interrupt may have kept from those that wait."""
    told, handed = [], []
    endpoint = Mock(when_over=lambda _, call: not told.append(call))
    messages = Messages(endpoint, "w", PATIENCE, lambda error: error, OperationLog(0, 2))
    future = torch.futures.Future()
    messages.when_over(work(None), future)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool, "run", interrupted)
        told[0]()
    monkeypatch.setattr(pool, "run", lambda job, **_: handed.append(job))
    told[0]()
    told[0]()
    for job in handed:
        job()
    assert len(handed) == 2
    assert future.done()
