"""What an endpoint has to write while the other end does not read, and no thread of this one waits."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from test_lane_endpoint import buffer, mesh, payload, soon, until

from multiworld._core.lane import frames
from multiworld._core.lane.operations import SizesDifferError
from multiworld._net.lane.awaiting import Watch
from multiworld._net.lane.background import Background
from multiworld._net.lane.connections import Next

SIZE = 1 << 20


class Full:
    """A connection that takes no bytes while it is full."""

    def __init__(self, connection):
        self._connection, self.full = connection, True

    def __getattr__(self, name):
        if name == "sendmsg" and self.full:
            return Mock(side_effect=BlockingIOError)  # raised by no code of a program
        return getattr(self._connection, name)


@pytest.fixture
def pair():
    made = mesh(2)
    yield made
    for each in made:
        each.fail(ConnectionError("the test is over"))


@pytest.fixture
def full(pair):
    """The connection of rank 1, which can only read."""
    connection = pair[1]._net.sockets[0] = Full(pair[1]._net.sockets[0])
    return connection


def waits(end):
    end.receive(0, 0, 0, buffer(SIZE + 1), soon())


def posts(end):
    end.ready(0)
    receive = end.post_receive(0, 0, 0, buffer(SIZE + 1))
    raise receive.error


def awaits(end):
    async def main():
        watch = Watch(end, asyncio.get_running_loop())
        receive = end.post_receive(0, 0, 0, buffer(SIZE + 1))
        assert await watch.until_over(receive, 30.0)
        raise receive.error

    asyncio.run(main())


@pytest.mark.parametrize("receives", [waits, posts, awaits])
def test_control_frames_are_written_though_no_operation_waits_for_them(pair, full, receives):
    left = []
    pair[1].left_alone = lambda *what: left.append(what)
    send = pair[0].post_send(1, 0, 0, memoryview(payload(SIZE, 5)))
    with pytest.raises(SizesDifferError):  # and the sender is told that the message is not needed
        receives(pair[1])
    assert len(left) == 1
    full.full = False
    background = Background()
    background.take_on(*left.pop())
    pair[0].wait(send, soon())
    assert not left
    until(lambda: not background._watches)
    background.dismiss()
    until(lambda: background._loop is None)


class Taking:
    """A connection whose other end keeps up: it takes all."""

    def __init__(self, connection):
        self._connection, self.took = connection, 0

    def sendmsg(self, views, *_):
        self.took += (count := sum(map(len, views)))
        return count

    def __getattr__(self, name):
        return getattr(self._connection, name)


def test_a_long_message_is_written_in_turns_in_which_others_have_the_lock(pair):
    size, most = 64 << 20, 10 << 20  # two turns, and what one write takes
    blocked = []
    pair[0].watch("the test", blocked.append, lambda: None)
    send = pair[0].post_send(1, 0, 0, memoryview(bytes(size)))
    pair[1].post_receive(0, 0, 0, buffer(size))  # once it has come
    pair[1].ready(0)
    taking = pair[0]._net.sockets[1] = Taking(pair[0]._net.sockets[1])
    turns = 0
    while not send.done:
        before = taking.took
        after = pair[0].ready(1)
        assert taking.took - before <= most
        assert after is (Next.READ if send.done else Next.WRITE)
        assert blocked == [1]
        turns += 1
    assert taking.took == size + size // frames.CHUNK * frames.HEADER.size
    assert turns >= size // most
