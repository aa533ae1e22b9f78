"""What a thread puts together is closed, and aborts wait for it; with process groups that are fakes."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.nccl import coalescing, inflight  # noqa: E402  (torch may be missing)

Error = inflight.DistBackendError
LONG = 30.0


class Group:
    """A process group: how deep it is open, in one thread."""

    def __init__(self):
        self.depth = 0
        self.pending = {self: []}

    def start(self, traffic):
        with coalescing.start(self, traffic, self.pending, self.end):
            self.depth += 1

    def end(self):
        if self.depth == 0:
            raise RuntimeError("not in a group call")
        self.depth -= 1


def traffic(timeout=LONG):
    return inflight.Traffic(timeout=timeout, device=torch.device("cuda", 0), torch_aborts=False)


@pytest.fixture
def world():
    world, group = traffic(), Group()
    yield world, group
    found = coalescing.of(group)
    if found is not None:
        found.close()


def test_it_is_known_while_it_is_open(world):
    traffic, group = world
    assert coalescing.of(group) is None
    group.start(traffic)
    assert coalescing.of(group).ended()
    assert coalescing.of(group) is None


def test_it_may_be_started_within_itself(world):
    traffic, group = world
    group.start(traffic)
    group.start(traffic)
    assert not coalescing.of(group).ended()
    assert coalescing.of(group).ended()


def test_closing_ends_it_as_often_as_it_was_started(world):
    traffic, group = world
    group.start(traffic)
    group.start(traffic)
    coalescing.of(group).close()
    assert group.depth == 0
    assert coalescing.of(group) is None
    assert group.pending == {}, "or torch would put the next operations to it"


def test_it_is_let_go_of_also_where_it_cannot_be_closed(world):
    traffic, group = world
    group.start(traffic)
    group.end = [].pop
    found = coalescing.of(group)
    found.close()
    assert coalescing.of(group) is None
    assert aborted(traffic).wait(LONG)


def test_what_another_group_has_open_is_known_and_closed_with_its_world(world):
    traffic, group = world
    other = Group()
    assert coalescing.beside(other) is None
    group.start(traffic)
    assert coalescing.beside(group) is None
    assert coalescing.beside(other) is coalescing.of(group)
    traffic.abort([])
    assert coalescing.beside(other) is None
    assert (coalescing.of(group), group.depth) == (None, 0)


def test_it_counts_the_operations_that_were_taken(world):
    traffic, group = world
    group.start(traffic)
    with coalescing.of(group):
        pass
    with pytest.raises(ZeroDivisionError), coalescing.of(group):
        raise ZeroDivisionError
    assert coalescing.of(group).taken == 1


def test_closing_what_a_failure_has_closed_is_no_error(world):
    traffic, group = world
    group.start(traffic)
    group.depth = 0
    coalescing.of(group).close()
    assert coalescing.of(group) is None


def test_another_thread_has_nothing_open(world):
    traffic, group = world
    group.start(traffic)
    found = []
    thread = threading.Thread(target=lambda: found.append(coalescing.of(group)))
    thread.start()
    thread.join(LONG)
    assert found == [None]


def test_a_start_that_fails_leaves_nothing(world):
    traffic, group = world
    with pytest.raises(ZeroDivisionError), coalescing.start(group, traffic, {}, group.end):
        raise ZeroDivisionError
    assert coalescing.of(group) is None
    assert aborted(traffic).wait(LONG)


def test_it_is_not_started_in_a_world_that_is_over(world):
    traffic, group = world
    traffic.abort([])
    with pytest.raises(Error):
        group.start(traffic)
    assert (coalescing.of(group), group.depth) == (None, 0)


def test_nor_within_itself_and_the_outer_one_is_closed(world):
    traffic, group = world
    group.start(traffic)
    traffic.abort([])
    with pytest.raises(Error):
        group.start(traffic)
    assert (coalescing.of(group), group.depth) == (None, 0)


def test_a_block_closes_what_was_opened_in_it_and_no_more(world):
    traffic, group = world
    inner = Group()
    traffic.block_begins()
    group.start(traffic)
    traffic.block_begins()
    inner.start(traffic)
    assert coalescing.close_left(traffic, 1) == [inner]
    assert (group.depth, inner.depth) == (1, 0)
    assert coalescing.close_left(traffic, 0) == [group]
    assert group.depth == 0


def test_another_world_s_stays_open(world):
    mine, group = world
    mine.block_begins()
    group.start(mine)
    assert coalescing.close_left(traffic(), 0) == []
    assert group.depth == 1


def aborted(traffic):
    done = threading.Event()
    traffic.abort([done.set])
    return done


def test_an_abort_waits_for_operations_in_it(world, monkeypatch):
    monkeypatch.setattr(inflight, "QUIET", 0.01)
    traffic, group = world
    group.start(traffic)
    with coalescing.of(group):
        pass
    done = aborted(traffic)
    assert not done.wait(0.3)
    coalescing.of(group).close()
    assert done.wait(LONG)


def test_it_does_not_wait_where_there_are_none_or_they_do_not_return(world, monkeypatch):
    monkeypatch.setattr(inflight, "QUIET", 0.01)
    traffic, group = world
    group.start(traffic)
    assert aborted(traffic).wait(LONG)
    with coalescing.of(group):
        assert aborted(traffic).wait(LONG)


def test_it_does_not_wait_for_longer_than_an_operation_may_take(monkeypatch):
    monkeypatch.setattr(inflight, "QUIET", 0.01)
    short, group = traffic(timeout=0.2), Group()
    group.start(short)
    with coalescing.of(group):
        pass
    assert aborted(short).wait(LONG)
    coalescing.of(group).close()


def test_nor_for_a_thread_that_has_ended(world, monkeypatch):
    monkeypatch.setattr(inflight, "QUIET", 0.01)
    traffic, group = world

    def leave_it():
        group.start(traffic)
        with coalescing.of(group):
            pass

    thread = threading.Thread(target=leave_it)
    thread.start()
    thread.join(LONG)
    assert aborted(traffic).wait(LONG)
