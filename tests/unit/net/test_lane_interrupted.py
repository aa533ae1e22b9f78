"""A receive that a signal's handler ends, wherever it stands: no message is lost, and nothing waits for its thread."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from kits import tlskit
from kits.lanekit import payload
from test_lane_endpoint import PATIENCE, buffer, mesh, soon, until

from multiworld._core.lane import frames
from multiworld._net.lane import reading
from multiworld._net.lane.endpoint import Endpoint
from multiworld._net.lane.waiting import LateError


class Interrupted(BaseException):
    """What the handler raises."""


@pytest.fixture
def pair():
    made = mesh(2)
    yield made
    for each in made:
        each.fail(ConnectionError("the test is over"))


class Lock:
    """The endpoint's lock; a signal comes in this thread as it is released for the `at`th time, after `call`."""

    def __init__(self, at, call=lambda: None):
        self.left, self._lock, self._thread = at, threading.Lock(), threading.get_ident()
        self._call = call

    def __enter__(self):
        self._lock.acquire()

    def locked(self):
        return self._lock.locked()

    def __exit__(self, *_):
        self._lock.release()
        if self._thread == threading.get_ident():
            self.left -= 1
            if not self.left:
                self._call()
                raise Interrupted


class Signalled:
    """A connection: a signal comes once something was read of it, or written to it, for the `at`th time."""

    def __init__(self, connection, raised, name="recv_into", at=1):
        self._connection, self._raised, self._name, self._left = connection, raised, name, at

    def __getattr__(self, name):
        method = getattr(self._connection, name)
        if name != self._name:
            return method

        def call(*args):
            result = method(*args)
            self._left -= 1
            if not self._left:
                raise self._raised
            return result

        return call


def goes_on(pair, size, was_into):
    """The lane has ended, and says so, or the message goes to the next receive, and nothing to the one before."""
    end = pair[1]
    assert end._leader is None
    assert end._short is None
    if end._core.error is not None:
        with pytest.raises(ConnectionAbortedError, match="interrupted by Interrupted"):
            end.receive(0, 0, 0, buffer(size), soon())
        return
    before = bytes(was_into)
    for number in (1, 2):
        if number == 2:
            sending = threading.Thread(
                target=pair[0].send, args=(1, 0, 0, memoryview(payload(size, 2)), soon()), daemon=True
            )
            sending.start()
        assert end.receive(0, 0, 0, got := buffer(size), soon()) == 0
        assert bytes(got) == payload(size, number)
    sending.join(PATIENCE)
    assert bytes(was_into) == before


# All that a receive does with the lock: how often depends on the way.
@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("way", ["short", "from any", "posted", "here"])
def test_an_interrupt_as_the_lock_is_released(pair, way, at):
    size, source = 8, None if way == "from any" else 0
    sending = pair[0].post_send(1, 0, 0, memoryview(payload(size, 1)))
    assert sending.done
    lock = pair[1]._lock = Lock(at)
    into = buffer(size)
    try:
        if way == "posted":
            receive = pair[1].post_receive(source, 0, 0, into)
            pair[1].cancel(receive)  # so that the message is there for the next one
        elif way == "here":
            pair[1].ready(0)
            pair[1].receive(source, 0, 0, into, soon())
        else:
            pair[1].receive(source, 0, 0, into, soon())
    except Interrupted:
        pass
    else:
        if way != "posted":
            assert lock.left > 0  # it is not released so often
            assert bytes(into) == payload(size, 1)
            return
    finally:
        lock.left = -1
    goes_on(pair, size, into)


@pytest.mark.parametrize("raised", [Interrupted(), TimeoutError("the program's")], ids=repr)
def test_an_interrupt_as_a_short_message_is_read_ends_the_lane(pair, raised):
    """What was read is nowhere known."""
    pair[0].send(1, 0, 0, memoryview(payload(8, 1)), soon())
    pair[1]._net.sockets[0] = Signalled(pair[1]._net.sockets[0], raised)
    with pytest.raises(type(raised)) as seen:
        pair[1].receive(0, 0, 0, buffer(8), soon())
    assert seen.value is raised
    assert "was interrupted" in str(pair[1]._core.error)


@pytest.mark.parametrize("kind", [TimeoutError, BlockingIOError])
@pytest.mark.parametrize("name", ["sendmsg", "recv_into"])
@pytest.mark.parametrize("way", ["send", "receive"])
def test_what_a_handler_raises_as_a_connection_is_used_is_no_fault_of_the_connection(kind, name, way):
    """Swallowed, a part of a message would be written twice, or be missing, or its member be held for lost."""
    raised, lost, size = kind("the program's"), [], 4 << 20
    one, other = socket.socketpair()
    mine, theirs = Endpoint({1: one}, None, lambda *what: lost.append(what)), Endpoint({0: other})
    mine._net.sockets[1] = Signalled(one, raised, name)
    call, posts = (mine.send, theirs.post_receive) if way == "send" else (mine.receive, theirs.post_send)
    posted = posts(0, 0, 0, buffer(size))
    with ThreadPoolExecutor(1) as other_member:
        going_on = other_member.submit(theirs.wait, posted, soon())
        with pytest.raises(kind) as seen:
            call(1, 0, 0, buffer(size), soon())
        for each in (theirs, mine):
            each.fail(ConnectionError("the test is over"))
        going_on.result(PATIENCE)
    assert seen.value is raised
    assert f"interrupted by {kind.__name__}" in str(mine._core.error)
    assert not lost


def test_what_a_handler_raises_between_two_records_is_raised_at_once(tmp_path):
    credentials = tlskit.Files(tmp_path, tlskit.authority()).credentials
    one, other = tlskit.met(*socket.socketpair(), credentials)
    with contextlib.closing(one), contextlib.closing(other):
        raised = TimeoutError("the program's")
        one.send(bytes(40_000))  # three records
        other._socket = Signalled(other._socket, raised, at=2)
        with pytest.raises(TimeoutError) as seen:
            other.recv_into(buffer(100_000))
        assert seen.value is raised


@pytest.mark.parametrize(
    "raised", [TimeoutError("the program's"), BlockingIOError("the program's")], ids=repr
)
def test_a_small_message_that_was_written_is_not_written_again(pair, raised):
    pair[0]._net.sockets[1] = Signalled(pair[0]._net.sockets[1], raised, "sendmsg", at=2)
    sent = []
    with pytest.raises(type(raised)) as seen:
        for number in (1, 2, 3):
            pair[0].send(1, 0, 0, memoryview(payload(8, number)), soon())
            sent.append(number)
    assert (seen.value, sent) == (raised, [1])
    pair[0].fail(ConnectionError("the test is over"))
    for number in (1, 2):
        pair[1].receive(0, 0, 0, got := buffer(8), soon())
        assert bytes(got) == payload(8, number)
    pair[1].ready(0)
    assert 0 not in pair[1]._net.sockets  # its end has come, and no third message


def test_a_message_that_is_taken_back_has_its_place(pair):
    for number in (1, 2, 3):
        pair[0].send(1, 0, 0, memoryview(payload(8, number)), soon())
        if number == 1:
            lock = pair[1]._lock = Lock(2)
            with pytest.raises(Interrupted):
                pair[1].receive(0, 0, 0, buffer(8), soon())
    pair[1].ready(0)
    for number in (1, 2, 3):
        pair[1].receive(0, 0, 0, got := buffer(8), soon())
        assert bytes(got) == payload(8, number)
    assert lock.left < 0


def test_a_message_is_taken_back_whatever_another_thread_receives(pair):
    def elsewhere():
        with ThreadPoolExecutor(1) as other, pytest.raises(LateError):
            other.submit(pair[1].receive, 0, 0, 1, buffer(8), 0.0).result(PATIENCE)

    pair[0].send(1, 0, 0, memoryview(payload(8, 1)), soon())
    lock = pair[1]._lock = Lock(2, elsewhere)
    with pytest.raises(Interrupted):
        pair[1].receive(0, 0, 0, buffer(8), soon())
    assert lock.left < 0
    goes_on(pair, 8, buffer(8))


def test_an_interrupt_before_a_thread_reads_leaves_the_reading_to_the_next(monkeypatch):
    monkeypatch.setattr(frames, "PIECE", 100_000)
    monkeypatch.setattr(reading, "LONG", 300_000)

    def read(address, view, stop, copied):
        view[:] = ctypes.string_at(address, len(view))
        return True

    one, other = socket.socketpair()
    ends = Endpoint({1: one}, {1: read}), Endpoint({0: other}, {0: read})
    try:
        data = bytearray(payload(1_000_000, 1))
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        send = ends[0].post_send(1, 0, 0, memoryview(data), address)
        receive = ends[1].post_receive(0, 0, 0, got := buffer(len(data)))
        ends[1]._lock = Lock(2)
        with pytest.raises(Interrupted):
            ends[1].ready(0)  # it would start the thread
        assert not ends[1]._reading.has_thread
        ends[1].wait(receive, soon())
        ends[0].wait(send, soon())
        assert got == data
    finally:
        for end in ends:
            end.fail(ConnectionError("the test is over"))
    until(lambda: not any(each.name == "m8d-read" for each in threading.enumerate()))
