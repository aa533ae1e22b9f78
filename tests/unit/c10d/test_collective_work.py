"""The work of a collective over the lane: its future, and when that is done."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.lane import collective_work  # noqa: E402  (torch may be missing)


class Over:
    """A collective, and the messages of its world."""

    done, error = True, None

    def __init__(self):
        self.outputs = [torch.ones(1)]

    def conclude(self, collective, timeout=0.0):
        assert collective is self

    def explained(self, error):
        return error


class Busy:
    """A pool whose threads come to no job."""

    def __init__(self):
        self.jobs = []

    def run(self, job, *, later=False):
        assert later  # a host without a thread left is no error of the program's
        self.jobs.append(job)


@pytest.fixture
def busy(monkeypatch):
    made = Busy()
    monkeypatch.setattr(collective_work, "pool", made)
    return made


def test_the_future_of_a_collective_that_is_over_is_done(busy):
    over = Over()
    future = collective_work.CollectiveWork(over, over).get_future()
    assert future.done()
    assert future.value() is over.outputs
    assert busy.jobs == []


def test_a_future_waits_for_its_collective_in_the_pool(busy):
    under_way = Over()
    under_way.done = False
    future = collective_work.CollectiveWork(under_way, under_way).get_future()
    assert not future.done()
    (job,) = busy.jobs
    job()
    assert future.value() is under_way.outputs


def test_the_error_of_a_future_is_found_in_the_pool(busy):
    """To find it may take until the world's verdict."""
    failed = Over()
    failed.error = ValueError("no")

    def conclude(collective, timeout=0.0):
        raise failed.error

    failed.conclude = conclude
    future = collective_work.CollectiveWork(failed, failed).get_future()
    assert not future.done()
    (job,) = busy.jobs
    job()
    with pytest.raises(ValueError, match="no"):
        future.wait()
