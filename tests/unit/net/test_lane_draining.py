"""Waiting until what was sent is received, beside receivers that read nothing unless they are asked to."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kits.lanekit import payload

from multiworld._core.lane import frames
from multiworld._net.lane.endpoint import Endpoint

PATIENCE = 120.0  # seconds; nothing takes that long when all is well


def soon():
    return time.monotonic() + PATIENCE


class Members:
    """Rank 0 drains; the others read when they are asked, if they `heed` it."""

    def __init__(self, size):
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        for ends in pairs.values():
            for each in ends:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.sender = Endpoint({rank: ends[0] for rank, ends in pairs.items()})
        self.receivers = {rank: Endpoint({0: ends[1]}) for rank, ends in pairs.items()}
        self.heed = True
        self.asked = []
        self.asked_again = threading.Semaphore(0)

    def ask(self, ranks):
        self.asked.append(ranks)
        if self.heed:
            for rank in ranks:
                self.receivers[rank].ready(0)
        self.asked_again.release()

    def drain(self, deadline=None):
        return self.sender.drain(soon() if deadline is None else deadline, self.ask)

    def until_asked(self, times=1):
        for _ in range(times):
            assert self.asked_again.acquire(timeout=PATIENCE)

    def send(self, rank, data):
        return self.sender.post_send(rank, 0, 0, memoryview(data))

    def receive(self, rank, size):
        view = memoryview(bytearray(size))
        self.receivers[rank].receive(0, 0, 0, view, soon())
        return bytes(view)


@pytest.fixture
def members():
    made = []

    def connect(size):
        made.append(Members(size))
        return made[-1]

    yield connect
    for each in made:
        for end in (each.sender, *each.receivers.values()):
            end.fail(ConnectionError("the test is over"))


def test_who_has_received_all_and_waits_for_nothing_answers_when_asked(members):
    net = members(4)
    for rank in (1, 2):
        net.send(rank, b"abcd")
        assert net.receive(rank, 4) == b"abcd"
    assert net.drain()
    # Rank 3 was sent nothing.
    assert set(net.asked[0]) == {1, 2}
    assert all(set(ranks) <= {1, 2} for ranks in net.asked)


def test_who_reads_without_being_asked_ends_it_too(members):
    net = members(2)
    net.heed = False
    net.send(1, b"abcd")
    with ThreadPoolExecutor(1) as other:
        done = other.submit(lambda: [net.receive(1, 4), net.receive(1, 4)])
        assert net.drain()
        net.send(1, b"efgh")
        assert done.result(PATIENCE) == [b"abcd", b"efgh"]


def test_who_does_not_answer_is_asked_again_but_seldom(members):
    net = members(2)
    net.heed = False
    net.send(1, b"abcd")
    assert net.receive(1, 4) == b"abcd"
    assert not net.drain(time.monotonic() + 1.0)
    assert set(net.asked) == {(1,)}
    assert 1 <= len(net.asked) <= 7
    net.heed = True
    assert net.drain()


def test_a_deadline_that_is_over_asks_nobody(members):
    net = members(2)
    net.send(1, b"abcd")
    assert not net.drain(time.monotonic())
    assert net.asked == []


@pytest.mark.parametrize("size", [4, 150_000, frames.EAGER_LIMIT + 1])
def test_messages_without_a_receive_hold_it_until_the_last_is_received(members, size):
    """Also where the connection takes only a part of them before their receiver is asked."""
    net, count = members(2), 5
    given = [payload(size, number) for number in range(count)]
    for data in given:
        net.send(1, data)
    with ThreadPoolExecutor(1) as other:
        done = other.submit(net.drain)
        for data in given:
            net.until_asked()
            assert not done.done()
            assert net.receive(1, size) == data
        assert done.result(PATIENCE) is True


def test_messages_that_are_received_while_they_are_written(members):
    net, count, size = members(2), 20, 100_000
    for number in range(count):
        net.send(1, payload(size, number))
    with ThreadPoolExecutor(1) as other:
        done = other.submit(net.drain)
        for number in range(count):
            assert net.receive(1, size) == payload(size, number)
        assert done.result(PATIENCE) is True


def test_the_end_of_the_lane_ends_it(members):
    net = members(2)
    net.heed = False
    net.send(1, b"abcd")
    with ThreadPoolExecutor(1) as other:
        done = other.submit(net.drain)
        net.until_asked()
        net.sender.fail(ConnectionAbortedError("it is over"))
        assert done.result(PATIENCE) is False


def test_a_member_that_is_lost_ends_it(members):
    net = members(2)
    net.heed = False
    net.send(1, b"abcd")
    with ThreadPoolExecutor(1) as other:
        done = other.submit(net.drain)
        net.until_asked()
        net.receivers[1].fail(ConnectionAbortedError("it is over"))
        assert done.result(PATIENCE) is True
