"""The end of a message whose bytes are put into the tensor by a thread that waits for it."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.lane.work import LaneWork  # noqa: E402  (torch may be missing)

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
