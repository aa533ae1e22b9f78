"""Messages that are read from their senders' memory: nothing else is held up, and nothing is written too late."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kits.lanekit import payload

from multiworld._core.lane import frames
from multiworld._net.lane import reading, reading_threads
from multiworld._net.lane.awaiting import Watch
from multiworld._net.lane.background import Background
from multiworld._net.lane.endpoint import Endpoint

PATIENCE = 120.0  # seconds; nothing takes that long when all is well
PIECE = 100_000
SIZE = 1_000_000


def soon():
    return time.monotonic() + PATIENCE


def until(condition):
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Memory:
    """Reads this process's memory, a piece at a time; `at` lists pieces that wait for `go`, `stays` such that have been copied then."""

    def __init__(self):
        self.pieces = 0
        self.at = set()
        self.stays = set()
        self.waits = threading.Event()
        self.go = threading.Event()
        self.leaves = threading.Event()
        self.fails = False
        self.hears = True  # that it is to stop

    def __call__(self, address, view, stop, copied):
        assert len(view) <= PIECE
        self.pieces += 1
        if self.pieces in self.at:
            self.waits.set()
            deadline = soon()
            while not self.go.wait(0.001):
                assert time.monotonic() < deadline
                if self.hears and stop():
                    return False
        view[:] = ctypes.string_at(address, len(view))
        if self.pieces in self.stays:
            copied._places[:] = bytes(2)
            self.waits.set()
            assert self.leaves.wait(PATIENCE)
        return not self.fails


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(frames, "PIECE", PIECE)
    monkeypatch.setattr(reading, "LONG", PIECE)
    return Memory()


@pytest.fixture
def ends(memory):
    one, other = socket.socketpair()
    made = Endpoint({1: one}, {1: Memory()}), Endpoint({0: other}, {0: memory})
    yield made
    for each in made:
        each.fail(ConnectionError("the test is over"))


def posted(end, number, tag=0, size=SIZE):
    """Begin to send, from memory that can be read."""
    data = bytearray(payload(size, number))
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    return end.post_send(1, 0, tag, memoryview(data), address, keep=data)


def buffer(size=SIZE):
    return memoryview(bytearray(size))


def finished(end, send):
    """Look at the connection until a send is over."""
    end.wait(send, soon())
    assert send.error is None


def test_a_message_is_read_in_pieces(ends, memory):
    """And who waits for it is not woken by each."""
    end, wakes = ends[1], []
    wake = end._wake_leader
    end._wake_leader = lambda: (wakes.append(None), wake())
    send = posted(ends[0], 1)
    end.receive(0, 0, 0, got := buffer(), soon())
    assert bytes(got) == payload(SIZE, 1)
    assert memory.pieces == SIZE // PIECE
    assert len(wakes) < SIZE // PIECE / 2
    finished(ends[0], send)


def test_one_thread_reads(ends, monkeypatch):
    calls = []
    monkeypatch.setattr(reading_threads, "run", calls.append)
    send = posted(ends[0], 1)
    operation = ends[1].post_receive(0, 0, 0, buffer())
    ends[1].ready(0)
    assert not ends[1].read_on()
    (call,) = calls
    call()
    assert operation.done
    finished(ends[0], send)


@pytest.mark.parametrize("waits", ["thread", "loop"])
def test_the_end_is_heard_in_the_middle_of_a_piece(ends, memory, waits):
    memory.at = {3}
    posted(ends[0], 1)
    got = buffer()

    async def awaits():
        operation = ends[1].post_receive(0, 0, 0, got)
        await Watch(ends[1], asyncio.get_running_loop()).until_over(operation)
        raise operation.error

    with ThreadPoolExecutor(1) as thread:
        if waits == "thread":
            receives = thread.submit(ends[1].receive, 0, 0, 0, got, soon())
        else:
            receives = thread.submit(lambda: asyncio.run(awaits()))
        assert memory.waits.wait(PATIENCE)
        began = time.monotonic()
        ends[1].fail(ConnectionError("the world broke"))
        assert time.monotonic() - began < PATIENCE / 2
        had = bytes(got)
        with pytest.raises(ConnectionError, match="the world broke"):
            receives.result(PATIENCE)
    assert bytes(got) == had


def test_the_end_waits_for_no_system_call(ends, memory):
    """As one that frees the memory of a sender that died; only the receive whose buffer it may write in does."""
    memory.at, memory.hears = {3}, False
    posted(ends[0], 1)
    posted(ends[0], 2, tag=1)
    got = buffer()
    with ThreadPoolExecutor(2) as threads:
        receives = threads.submit(ends[1].receive, 0, 0, 0, got, soon())
        assert memory.waits.wait(PATIENCE)
        others = [ends[1].post_receive(0, 0, tag, buffer()) for tag in (1, 2)]
        waits = threads.submit(ends[1].wait, others[1], soon())
        ends[1].fail(ConnectionError("the world broke"))
        waits.result(PATIENCE)
        for each in others:
            with pytest.raises(ConnectionError, match="the world broke"):
                raise each.error
        assert not receives.done()
        memory.go.set()
        with pytest.raises(ConnectionError, match="the world broke"):
            receives.result(PATIENCE)
    assert memory.pieces == 3
    had = bytes(got)
    assert had[2 * PIECE : 3 * PIECE] == payload(SIZE, 1)[2 * PIECE : 3 * PIECE]


@pytest.mark.parametrize("waits", ["thread", "loop", "background"])
@pytest.mark.parametrize("size", [PIECE, SIZE])
def test_a_receive_waits_for_no_system_call_that_has_copied(ends, memory, waits, size):
    """As one that frees the memory of a sender that died. Who reads a short message itself does."""
    memory.stays = {size // PIECE}
    posted(ends[0], 1, size=size)
    got, ended = buffer(size), threading.Event()
    operation = ends[1].post_receive(0, 0, 0, got)
    ends[1].when_over(operation, ended.set)

    async def awaits():
        await Watch(ends[1], asyncio.get_running_loop()).until_over(operation)

    with ThreadPoolExecutor(1) as thread:
        try:
            if waits == "thread":
                over = thread.submit(ends[1].wait, operation, soon())
            elif waits == "loop":
                over = thread.submit(lambda: asyncio.run(awaits()))
            else:
                over, background = ended, Background()
                background.take_on(ends[1], operation)
            assert memory.waits.wait(PATIENCE)
            ends[1].fail(ConnectionError("the world broke"))
            assert ended.wait(PATIENCE / 3)
            if size > PIECE and waits != "background":
                over.result(PATIENCE / 3)
            assert isinstance(operation.error, ConnectionError)
        finally:
            memory.leaves.set()


def test_a_receive_is_over_when_the_rest_of_its_piece_has_been_copied(ends, memory):
    """Not before; that the system call stays is a matter of its thread."""
    memory.at, memory.stays, memory.hears = {3}, {3}, False
    posted(ends[0], 1)
    with ThreadPoolExecutor(1) as thread:
        receives = thread.submit(ends[1].receive, 0, 0, 0, got := buffer(), soon())
        assert memory.waits.wait(PATIENCE)
        ends[1].fail(ConnectionError("the world broke"))
        with pytest.raises(TimeoutError):
            receives.result(0.05)
        memory.go.set()
        with pytest.raises(ConnectionError, match="the world broke"):
            receives.result(PATIENCE / 3)
        memory.leaves.set()
    assert got[2 * PIECE : 3 * PIECE] == payload(SIZE, 1)[2 * PIECE : 3 * PIECE]


def test_other_messages_pass_while_a_piece_is_read(ends, memory):
    memory.at = {3}
    send = posted(ends[0], 1)
    with ThreadPoolExecutor(1) as thread:
        receives = thread.submit(ends[1].receive, 0, 0, 0, got := buffer(), soon())
        assert memory.waits.wait(PATIENCE)
        ends[1].send(0, 0, 1, memoryview(b"out"), soon())
        ends[0].receive(1, 0, 1, small := buffer(3), soon())
        assert bytes(small) == b"out"
        assert ends[1].cancel(ends[1].post_receive(0, 0, 1, buffer(2)))
        memory.go.set()
        receives.result(PATIENCE)
    assert bytes(got) == payload(SIZE, 1)
    finished(ends[0], send)


@pytest.mark.parametrize("size", [PIECE, SIZE])
def test_a_leader_looks_at_its_connections(ends, memory, size):
    """Between two short messages, which it reads itself, and always while a thread reads a long one."""
    memory.at = {2}
    sends = [posted(ends[0], tag, tag, size=size) for tag in range(3)]
    receives = [ends[1].post_receive(0, 0, tag, buffer(size)) for tag in range(3)]
    with ThreadPoolExecutor(2) as threads:
        leads = threads.submit(ends[1].wait, receives[-1], soon())
        assert memory.waits.wait(PATIENCE)
        small, over = ends[1].post_receive(0, 0, 3, buffer(3)), threading.Event()
        seen = []
        ends[1].when_over(small, lambda: (seen.append(memory.pieces), over.set()))
        ends[0].send(1, 0, 3, memoryview(b"abc"), soon())
        if size == SIZE:
            assert over.wait(PATIENCE)
        memory.go.set()
        leads.result(PATIENCE)
    assert seen == [2]
    for each in sends:
        finished(ends[0], each)


def test_a_leader_sleeps_while_another_thread_reads(ends, memory):
    memory.at, end, looks = {1}, ends[1], []
    look = end._look
    end._look = lambda deadline: (looks.append(None), look(deadline))[1]
    posted(ends[0], 1)
    with ThreadPoolExecutor(2) as threads:
        leads = threads.submit(end.receive, 0, 0, 1, buffer(5000), soon())
        until(lambda: end._core._state.matching.arrivals)
        posts = threads.submit(end.post_receive, 0, 0, 0, got := buffer())
        assert memory.waits.wait(PATIENCE)
        end.cancel(end.post_receive(0, 0, 2, buffer(1)))  # wakes it
        time.sleep(0.02)
        before = len(looks)
        time.sleep(0.1)
        assert len(looks) <= before + 1
        memory.go.set()
        operation = posts.result(PATIENCE)
        until(lambda: operation.done)  # the leader goes on
        assert bytes(got) == payload(SIZE, 1)
        ends[0].send(1, 0, 1, memoryview(bytes(5000)), soon())
        leads.result(PATIENCE)


def test_a_loop_goes_on_while_a_piece_is_read(ends, memory):
    memory.at = {3}

    async def talk():
        send = posted(ends[0], 1)
        operation = ends[1].post_receive(0, 0, 0, got := buffer())
        over = asyncio.ensure_future(Watch(ends[1], asyncio.get_running_loop()).until_over(operation))
        assert await asyncio.to_thread(memory.waits.wait, PATIENCE)
        memory.go.set()
        await asyncio.wait_for(over, PATIENCE)
        assert bytes(got) == payload(SIZE, 1)
        await asyncio.to_thread(finished, ends[0], send)

    asyncio.run(talk())


@pytest.mark.parametrize("other", ["background", "loop", "thread", "nobody"])
def test_somebody_goes_on_when_the_leader_has_what_it_waits_for(ends, memory, other):
    """The leader came by the announcement and read the first pieces of a message of others."""
    background, end = Background(), ends[1]
    operation = end.post_receive(0, 0, 0, got := buffer())
    memory.at = {3}
    with ThreadPoolExecutor(2) as threads:
        leads = threads.submit(end.receive, 0, 0, 1, buffer(5000), soon())
        until(lambda: end._led is not None)
        if other == "background":
            background.take_on(end, operation)
            until(lambda: background._tasks)
        elif other == "loop":

            async def awaits():
                await Watch(end, asyncio.get_running_loop()).until_over(operation)

            waits = threads.submit(lambda: asyncio.run(awaits()))
            until(lambda: end._awaited)
        elif other == "thread":
            waits = threads.submit(end.wait, operation, soon())
            until(lambda: end._followers)
        send = posted(ends[0], 1)
        assert memory.waits.wait(PATIENCE)
        ends[0].send(1, 0, 1, memoryview(bytes(5000)), soon())
        memory.go.set()
        leads.result(PATIENCE)
        if other in ("loop", "thread"):
            waits.result(PATIENCE / 3)
        elif other == "nobody":
            end.wait(operation, soon())
        until(lambda: operation.done)
    assert bytes(got) == payload(SIZE, 1)
    until(lambda: not background._tasks)
    finished(ends[0], send)


@pytest.mark.parametrize("how", ["cancel", "take_back"])
def test_a_receive_is_cancelled_between_two_pieces(ends, memory, how):
    """The next receive reads the message anew; the buffer of the first stays as it is."""
    memory.at = {3}
    send = posted(ends[0], 1)
    first, got = ends[1].post_receive(0, 0, 0, before := buffer()), buffer()
    ends[1].ready(0)  # a thread begins to read
    with ThreadPoolExecutor(1) as threads:
        assert memory.waits.wait(PATIENCE)
        cancels = threads.submit(getattr(ends[1], how), first)
        with pytest.raises(TimeoutError):
            cancels.result(0.05)  # it waits for the piece
        memory.go.set()
        assert cancels.result(PATIENCE) in (True, None)
        assert first.done
        before[:] = bytes(SIZE)
        assert not send.done
        ends[1].receive(0, 0, 0, got, soon())
    assert bytes(got) == payload(SIZE, 1)
    assert not any(before)
    finished(ends[0], send)


def test_what_was_read_from_a_sender_that_ended_is_not_taken_for_its_message(ends, memory):
    """It need not have kept it until then."""
    memory.at = {SIZE // PIECE}
    posted(ends[0], 1)
    operation = ends[1].post_receive(0, 0, 0, buffer())
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(ends[1].wait, operation, time.monotonic() + 0.3)
        assert memory.waits.wait(PATIENCE)
        ends[0].fail(ConnectionError("over"))
        memory.go.set()
        with pytest.raises(TimeoutError):
            waits.result(PATIENCE)
    assert not operation.done


def test_without_a_thread_who_waits_reads_itself(ends, memory, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(reading_threads, "run", refuse)
    send = posted(ends[0], 1)
    ends[1].receive(0, 0, 0, got := buffer(), soon())
    assert bytes(got) == payload(SIZE, 1)
    finished(ends[0], send)
    memory.at = {SIZE // PIECE + 3}
    posted(ends[0], 2)
    with ThreadPoolExecutor(1) as thread:
        receives = thread.submit(ends[1].receive, 0, 0, 0, got, soon())
        assert memory.waits.wait(PATIENCE)
        ends[1].fail(ConnectionError("the world broke"))
        with pytest.raises(ConnectionError, match="the world broke"):
            receives.result(PATIENCE)


def test_an_error_of_the_thread_ends_the_lane(ends, caplog):
    def fails(*_):
        raise MemoryError

    ends[1]._reading._readers[0] = fails
    posted(ends[0], 1)
    with pytest.raises(ConnectionAbortedError, match="MemoryError"):
        ends[1].receive(0, 0, 0, buffer(), soon())
    assert "could not be read" in caplog.text


def test_a_read_that_is_interrupted_is_made_again(ends, memory):
    class Interrupted(BaseException):
        pass

    read, raised = ends[1]._reading._readers[0], []

    def interrupted(*args):
        if not raised:
            raised.append(None)
            raise Interrupted
        return read(*args)

    ends[1]._reading._readers[0] = interrupted
    send = posted(ends[0], 1, size=PIECE)
    operation = ends[1].post_receive(0, 0, 0, got := buffer(PIECE))
    with pytest.raises(Interrupted):
        ends[1].wait(operation, soon())
    ends[1].wait(operation, soon())
    assert bytes(got) == payload(PIECE, 1)
    finished(ends[0], send)
