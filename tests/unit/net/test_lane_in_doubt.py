"""An endpoint whose lane has ended where it stood, and what interrupts one that waits."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from kits.signalkit import At, Interrupted
from test_lane_endpoint import PATIENCE, buffer, mesh, payload, soon, until

from multiworld._core.lane import lane
from multiworld._net.lane import waiting, wakes
from multiworld._net.lane.connections import Next
from multiworld._net.lane.waiting import LateError
from multiworld.errors import MultiworldError

SIZE = 1 << 20


@pytest.fixture
def pair():
    made = mesh(2)
    yield made
    for each in made:
        each.fail(ConnectionError("the test is over"))


@pytest.fixture
def halfway(pair):
    """A large message, a part of which has come: what it comes into, its receive and its send."""
    receive = pair[1].post_receive(0, 0, 0, got := buffer(SIZE))
    send = pair[0].post_send(1, 0, 0, memoryview(payload(SIZE, 5)))
    for _ in range(9):
        pair[1].ready(0)
        pair[0].ready(1)
    assert any(got)
    assert not receive.done
    return got, receive, send


@pytest.mark.parametrize("call", ["ready", "drop", "post_send", "fail"])
def test_a_lane_in_doubt_reads_nothing_into_what_is_its_callers_again(pair, halfway, call):
    got, receive, _ = halfway
    pair[1]._in_doubt(KeyboardInterrupt())
    assert receive.done
    got[:] = bytes(SIZE)
    if call == "drop":
        pair[1].drop(0)
    elif call == "post_send":
        pair[1]._core.peers[0].outgoing._credit = 0  # it looks for more
        assert pair[1].post_send(0, 0, 0, buffer(8)).done
    elif call == "fail":
        pair[1].fail(ConnectionError("over"))
    else:
        assert pair[1].ready(0) is Next.NOTHING  # a loop that goes on to look would never sleep
    assert not any(got)


def test_a_lane_in_doubt_writes_nothing_more_of_what_is_its_callers_again(pair, halfway):
    _, receive, send = halfway
    pair[0]._in_doubt(KeyboardInterrupt())
    assert send.done
    for _ in range(1000):
        pair[0].ready(1)
        pair[1].ready(0)
    assert not receive.done


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("of the program"), MultiworldError("")])
def test_a_send_whose_caller_was_interrupted_is_left_to_another_thread(pair, monkeypatch, error):
    def interrupted(*_):
        raise error

    left = []
    pair[0].left_alone = lambda *what: left.append(what)
    with monkeypatch.context() as patch:
        patch.setattr(pair[0], "wait", interrupted)
        with pytest.raises(type(error)):
            pair[0].send(1, 0, 0, memoryview(payload(SIZE, 5)), soon())
    ((end, send),) = left
    assert (end, send.peer, send.done) == (pair[0], 1, False)


def test_one_that_is_late_is_not(pair):
    pair[0].left_alone = pytest.fail
    with pytest.raises(LateError):
        pair[0].send(1, 0, 0, memoryview(payload(SIZE, 5)), 0.0)


class Refusing:
    """A connection whose writes the kernel refuses, for a reason of this host's."""

    def __init__(self, connection, number):
        self._connection = connection
        self.sendmsg = Mock(side_effect=[OSError(number, "on purpose")] * 2)  # raised by no code of a program

    def __getattr__(self, name):
        return getattr(self._connection, name)


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.EFAULT, errno.EPIPE])
def test_a_write_that_fails_for_a_reason_of_this_host_ends_the_connection(pair, number):
    """Else the other end, which is there, waits until its timeout. One that is gone is told as it is found."""
    lost = []
    net = pair[0]._net
    net._lost = lambda rank, error: lost.append((rank, error.errno))
    net.sockets[1] = Refusing(net.sockets[1], number)
    pair[0].post_send(1, 0, 0, memoryview(payload(SIZE, 5)))
    assert lost == ([] if number == errno.EPIPE else [(1, number)])


def test_an_interrupt_that_ends_the_lane_is_told_once(pair, halfway):
    told = []
    pair[1].interrupted = told.append
    pair[1]._in_doubt(KeyboardInterrupt())
    pair[1]._in_doubt(SystemExit())
    pair[1].fail(ConnectionError("the world is over"))
    (error,) = told
    assert str(error) == "the lane was interrupted by KeyboardInterrupt"
    assert pair[1]._core.error is error


def test_one_that_ends_otherwise_tells_of_no_interrupt(pair):
    pair[1].interrupted = pytest.fail
    pair[1].fail(ConnectionError("the world is over"))
    pair[1]._in_doubt(KeyboardInterrupt())


@pytest.mark.parametrize("size", [8, SIZE])
def test_a_thread_that_leads_hears_of_an_interrupt_in_another_one(pair, size):
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(pair[1].receive, 0, 0, 0, buffer(size), soon())
        until(lambda: pair[1]._leader is not None)
        with pair[1]._lock:
            pair[1]._in_doubt(KeyboardInterrupt())
        with pytest.raises(ConnectionAbortedError, match="interrupted"):
            waits.result(PATIENCE / 2)


def told_though_signalled(at):
    """Return whether there was an instruction with this number; who awaits is told wherever the signal comes."""
    pair = mesh(2)
    try:
        receives = [pair[1].post_receive(0, 0, tag, buffer(8)) for tag in (0, 1)]
        told = []
        for each in receives:
            pair[1].when_over(each, lambda each=each: told.append(each))
        turn = threading.Lock()
        turn.acquire()
        pair[1]._followers[receives[0]] = [turn]
        for tag in (0, 1):
            pair[0].send(1, 0, tag, memoryview(payload(8, tag)), soon())
        signalled = At(at, {waiting.__file__, lane.__file__})
        try:
            with signalled:
                pair[1].ready(0)
        except Interrupted:
            pair[1].ready(0)  # unless the lane has ended
        assert set(told) == set(receives)
        assert not turn.locked()
        assert not pair[1]._awaited
        assert not pair[1]._followers
        return signalled.left <= 0
    finally:
        for each in pair:
            each.fail(ConnectionError("the test is over"))


def test_a_signal_as_those_that_wait_are_told_keeps_it_from_none():
    at = 1
    while told_though_signalled(at):
        at += 1
    assert at > 50


def handed_over_though_signalled(at):
    """Return whether there was an instruction with this number; the next thread leads, or hears of the end."""
    pair = mesh(2)
    try:
        end, turn = pair[1], threading.Lock()
        turn.acquire()
        end._followers[end.post_receive(0, 0, 0, buffer(8))] = [turn]
        end._leader = wakes.mine()
        signalled = At(at, {waiting.__file__})
        try:
            with signalled:
                try:
                    with end._lock:
                        end._give_up_lead()
                except Interrupted as error:
                    end._leave_in_doubt(error)
        except Interrupted:  # as it returned
            end._leave_in_doubt(Interrupted())
        assert not turn.locked()
        return signalled.left <= 0
    finally:
        for each in pair:
            each.fail(ConnectionError("the test is over"))


def test_a_signal_as_the_lead_is_handed_over_leaves_the_next_thread_not_alone():
    at = 1
    while handed_over_though_signalled(at):
        at += 1
    assert at > 30
