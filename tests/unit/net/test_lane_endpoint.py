"""Endpoints of a lane over real sockets: who reads and writes, and that whoever waits hears of the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kits import tlskit
from kits.lanekit import payload

from multiworld._core.lane import frames
from multiworld._core.lane.frames import pack
from multiworld._core.lane.operations import SizesDifferError
from multiworld._core.lane.outgoing import Outgoing
from multiworld._net.lane import graceful_close
from multiworld._net.lane.awaiting import Watch
from multiworld._net.lane.background import LOOK_EVERY, Background
from multiworld._net.lane.endpoint import Endpoint

PATIENCE = 120.0  # seconds; nothing takes that long when all is well
SIZES = [0, 4, 4000, 4001, 65536, frames.EAGER_LIMIT, frames.EAGER_LIMIT + 1, 1 << 20, 20 << 20]


def soon():
    return time.monotonic() + PATIENCE


def mesh(size, credentials=None):
    """Endpoints of `size` members, connected; a connection takes far less than a message of 64 KB."""
    pairs = {(a, b): socket.socketpair() for a in range(size) for b in range(a)}
    for each in itertools.chain(*pairs.values()):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    if credentials is not None:
        pairs = {ranks: tlskit.met(*ends, credentials) for ranks, ends in pairs.items()}
    connections = [{} for _ in range(size)]
    for (a, b), (one, other) in pairs.items():
        connections[a][b], connections[b][a] = one, other
    return [Endpoint(each) for each in connections]


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return tlskit.Files(tmp_path_factory.mktemp("tls"), tlskit.authority()).credentials


@pytest.fixture(params=["plain", "tls"])
def members(request, credentials):
    """Connects so many."""
    made = []

    def connect(size):
        made.extend(ends := mesh(size, credentials if request.param == "tls" else None))
        return ends

    yield connect
    for each in made:
        each.fail(ConnectionError("the test is over"))


@pytest.fixture
def pair(members):
    return members(2)


def until(condition):
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(LOOK_EVERY)


def buffer(size):
    return memoryview(bytearray(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_message(pair, size, first):
    data, got = payload(size, 5), buffer(size)
    with ThreadPoolExecutor(1) as other:
        if first == "send":
            done = other.submit(pair[0].send, 1, 0, 0, memoryview(data), soon())
            time.sleep(0.02)
            assert pair[1].receive(0, 0, 0, got, soon()) == 0
        else:
            done = other.submit(pair[1].receive, 0, 0, 0, got, soon())
            time.sleep(0.02)
            pair[0].send(1, 0, 0, memoryview(data), soon())
        done.result(PATIENCE)
    assert bytes(got) == data


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_both_send_first(pair, size):
    def exchange(rank):
        got = buffer(size)
        send = pair[rank].post_send(1 - rank, 0, 0, memoryview(payload(size, rank)))
        pair[rank].receive(1 - rank, 0, 0, got, soon())
        pair[rank].wait(send, soon())
        return bytes(got)

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(exchange, (0, 1), timeout=PATIENCE)) == [payload(size, 1), payload(size, 0)]


def test_many_messages_in_order_through_a_full_connection(pair):
    count = 20_000

    def sends():
        for number in range(count):
            pair[0].send(1, 0, 0, memoryview(number.to_bytes(8, "little")), soon())

    with ThreadPoolExecutor(1) as other:
        done = other.submit(sends)
        got = buffer(8)
        for number in range(count):
            pair[1].receive(0, 0, 0, got, soon())
            assert int.from_bytes(got, "little") == number
        done.result(PATIENCE)


@pytest.mark.parametrize(("size", "messages"), [(8, 100), (100_000, 20)])
def test_threads_that_wait_are_served_by_the_one_that_leads(pair, size, messages):
    """Eight threads a side, each with a tag of its own, in both directions."""

    def talk(tag):
        got = buffer(size)
        for number in range(messages):
            data = payload(size, 1000 * tag + number)
            if tag % 2:
                pair[1].send(0, 0, tag, memoryview(data), soon())
                pair[1].receive(0, 0, tag, got, soon())
            else:
                pair[1].receive(0, 0, tag, got, soon())
                pair[1].send(0, 0, tag, memoryview(data), soon())
            assert bytes(got) == data

    def answers(tag):
        got = buffer(size)
        for number in range(messages):
            data = payload(size, 1000 * tag + number)
            if tag % 2:
                pair[0].receive(1, 0, tag, got, soon())
                pair[0].send(1, 0, tag, memoryview(data), soon())
            else:
                pair[0].send(1, 0, tag, memoryview(data), soon())
                pair[0].receive(1, 0, tag, got, soon())

    with ThreadPoolExecutor(16) as threads:
        running = [threads.submit(each, tag) for tag in range(8) for each in (talk, answers)]
        for each in running:
            each.result(PATIENCE)


def test_any_source(members):
    ends = members(4)
    with ThreadPoolExecutor(3) as others:
        done = [
            others.submit(ends[rank].send, 0, 0, 0, memoryview(bytes([rank])), soon()) for rank in (1, 2, 3)
        ]
        got, senders = buffer(1), []
        for _ in range(3):
            senders.append(ends[0].receive(None, 0, 0, got, soon()))
            assert got[0] == senders[-1]
        assert sorted(senders) == [1, 2, 3]
        for each in done:
            each.result(PATIENCE)


@pytest.mark.parametrize("led", [False, True], ids=["alone", "another thread leads"])
def test_one_that_sends_on_and_on_keeps_no_other_from_its_turn(members, led):
    ends = members(3)
    flood = [ends[1].post_send(0, 0, 0, buffer(4)) for _ in range(500)]
    assert ends[0].receive(None, 0, 0, buffer(4), soon()) == 1
    ends[0].ready(1)
    assert ends[0].has_come(0)
    ends[2].send(0, 0, 0, buffer(4), soon())
    leader = os.eventfd(0)
    ends[0]._leader = leader if led else None  # it reads nothing, as one that has to wait for the GIL
    assert ends[0].receive(None, 0, 0, buffer(4), soon()) == 2
    ends[0]._leader = None
    os.close(leader)
    assert not flood[-1].done


@pytest.mark.parametrize("sizes", [(4, 5), (5, 4), (0, 4), (1 << 20, 4), (4, 1 << 20)])
def test_sizes_that_differ(pair, sizes):
    sent, expected = sizes
    with ThreadPoolExecutor(1) as other:
        done = other.submit(pair[0].send, 1, 0, 0, memoryview(payload(sent, 1)), soon())
        got = buffer(expected)
        with pytest.raises(SizesDifferError, match=f"{sent} bytes was sent by rank ., and {expected} are"):
            pair[1].receive(0, 0, 0, got, soon())
        assert not any(got)
        done.result(PATIENCE)
        after = other.submit(pair[0].send, 1, 0, 0, memoryview(b"next"), soon())
        pair[1].receive(0, 0, 0, got := buffer(4), soon())
        assert bytes(got) == b"next"
        after.result(PATIENCE)


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_deadline(pair, size):
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        pair[1].receive(0, 0, 0, buffer(size), began + 0.1)
    assert 0.1 <= time.monotonic() - began < PATIENCE
    with ThreadPoolExecutor(1) as other:
        done = other.submit(pair[0].send, 1, 0, 0, memoryview(payload(size, 3)), soon())
        pair[1].receive(0, 0, 0, got := buffer(size), soon())
        done.result(PATIENCE)
    assert bytes(got) == payload(size, 3), "the receive that ran out of time did not take it"


@pytest.mark.parametrize("size", [4, 4096, 1 << 20, 64 << 20])
@pytest.mark.parametrize("what", ["send", "receive"])
def test_the_end_is_heard_by_those_that_wait(pair, size, what):
    """One of them leads, the others follow; also in the middle of a message."""
    errors = []

    def waits(tag):
        try:
            if what == "send":
                for _ in range(10_000):
                    pair[0].send(1, 0, tag, memoryview(bytes(size)), soon())
            else:
                pair[0].receive(1, 0, tag, buffer(size), soon())
        except ConnectionError as error:
            errors.append((str(error), time.monotonic()))

    threads = [threading.Thread(target=waits, args=(tag,), daemon=True) for tag in range(3)]
    for each in threads:
        each.start()
    time.sleep(0.1)
    began = time.monotonic()
    pair[0].fail(ConnectionError("the world broke"))
    for each in threads:
        each.join(PATIENCE)
    assert [said for said, _ in errors] == ["the world broke"] * 3
    assert max(at for _, at in errors) - began < 5


def test_the_end_in_the_middle_of_a_message(pair):
    """What came stays; nothing is written any more."""
    got = buffer(64 << 20)
    errors = []

    def waits():
        try:
            pair[1].receive(0, 0, 0, got, soon())
        except ConnectionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    send = pair[0].post_send(1, 0, 0, memoryview(payload(64 << 20, 1)))
    while not got[1 << 20]:
        with contextlib.suppress(TimeoutError):
            pair[0].wait(send, time.monotonic() + 0.001)
    assert not send.done
    pair[1].fail(ConnectionError("the world broke"))
    thread.join(PATIENCE)
    assert errors == ["the world broke"]
    had = bytes(got[-8:])
    with pytest.raises(TimeoutError):
        pair[0].wait(send, time.monotonic() + 0.1)
    assert bytes(got[-8:]) == had == bytes(8)


def led(end, call):
    """Run `call` in a thread, which then leads; returns the thread, and how often it has looked."""
    looks = []
    look = end._look

    def counted(deadline):
        looks.append(None)
        return look(deadline)

    end._look = counted
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: looks)
    time.sleep(0.02)
    return thread, looks


@pytest.mark.parametrize("size", [8, 5000], ids=["short way", "posted"])
def test_the_leader_hears_of_what_another_reads(pair, size):
    """An event loop may be quicker to the bytes than a thread that waits for them."""
    thread, _ = led(pair[1], lambda: pair[1].receive(0, 0, 0, buffer(size), soon()))
    with pair[1]._lock:
        fed(pair[1], pack(frames.EAGER, size=size), bytes(size))
        pair[1]._go_on(0, select.POLLIN)
    thread.join(PATIENCE / 3)
    assert not thread.is_alive()


def fed(end, *parts):
    """Read these bytes from member 0, as a thread does that is quicker to them than `end`'s leader."""
    incoming = end._core.peers[0].incoming
    for part in parts:
        at = 0
        while at < len(part):
            want = incoming.want()
            count = min(len(want), len(part) - at)
            want[:count] = part[at : at + count]
            incoming.got(count)
            at += count


def test_the_leader_hears_of_what_one_that_sends_has_read(pair, monkeypatch):
    """A thread that sends much looks for credit, and may find the message that another waits for."""
    thread, _ = led(pair[1], lambda: pair[1].receive(0, 0, 0, buffer(8), soon()))
    monkeypatch.setattr(Outgoing, "low", True)
    with pair[1]._lock:
        fed(pair[1], pack(frames.EAGER, size=8), bytes(8))
    pair[1].post_send(0, 0, 0, memoryview(bytes(8)))
    thread.join(PATIENCE / 3)
    assert not thread.is_alive()


@pytest.mark.parametrize("later", ["blocking", "posted", "from any"])
def test_a_message_goes_to_the_receive_that_waits_the_short_way_before_later_ones(pair, later):
    first, second = buffer(8), buffer(8)
    thread, _ = led(pair[1], lambda: pair[1].receive(0, 0, 0, first, soon()))
    with ThreadPoolExecutor(1) as other:
        if later == "blocking":
            done = other.submit(pair[1].receive, 0, 0, 0, second, soon())
            until(lambda: pair[1]._short is None)  # it is posted
        else:
            posted = pair[1].post_receive(None if later == "from any" else 0, 0, 0, second)
            done = other.submit(pair[1].wait, posted, soon())
        for number in (1, 2):
            pair[0].send(1, 0, 0, memoryview(bytes([number]) * 8), soon())
        done.result(PATIENCE)
    thread.join(PATIENCE)
    assert (bytes(first), bytes(second)) == (b"\1" * 8, b"\2" * 8)


def test_what_has_its_message_the_short_way_is_posted_by_nobody(pair):
    """It would take the next message of its tag, of which its thread knows nothing."""
    end, seen = pair[1], []
    take = end._take

    def taking(*given):
        seen.append(end._short)
        return take(*given)

    end._take = taking
    thread, _ = led(end, lambda: end.receive(0, 0, 0, buffer(8), soon()))
    pair[0].send(1, 0, 0, memoryview(bytes(8)), soon())
    thread.join(PATIENCE)
    assert seen == [None], "from before it is taken, under the same hold of the lock"


def test_a_receive_that_waits_the_short_way_is_taken_back_at_its_deadline(pair):
    raised = []

    def receives():
        with pytest.raises(TimeoutError):
            pair[1].receive(0, 0, 0, buffer(8), time.monotonic() + 0.3)
        raised.append(True)

    thread, _ = led(pair[1], receives)
    posted = pair[1].post_receive(0, 0, 0, got := buffer(8))
    thread.join(PATIENCE)
    assert raised
    pair[0].send(1, 0, 0, memoryview(b"\1" * 8), soon())
    pair[1].wait(posted, soon())
    assert bytes(got) == b"\1" * 8


def test_an_interrupt_ends_the_short_way_as_well(pair):
    """A message may be half written: nothing goes out after it."""
    pair[0]._in_doubt(KeyboardInterrupt())
    with pytest.raises(ConnectionAbortedError, match="interrupted by KeyboardInterrupt"):
        pair[0].send(1, 0, 0, memoryview(bytes(8)), soon())


def test_more_control_frames_than_one_write_takes(pair):
    """Each message that is held back is asked for; the kernel takes 1024 pieces in one call."""
    count, size = 2000, 8192
    got = [buffer(size) for _ in range(count)]
    receives = [pair[1].post_receive(0, 0, 0, each) for each in got]
    sends = [pair[0].post_send(1, 0, 0, memoryview(payload(size, number))) for number in range(count)]
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(lambda: [pair[0].wait(each, soon()) for each in sends])
        for number, each in enumerate(receives):
            pair[1].wait(each, soon())
            assert bytes(got[number]) == payload(size, number)
        sent.result(PATIENCE)


def test_the_leader_writes_what_others_posted_and_then_sleeps(pair):
    thread, looks = led(pair[0], lambda: pair[0].receive(1, 0, 0, buffer(8), soon()))
    send = pair[0].post_send(1, 0, 0, memoryview(payload(65536, 1)))
    assert not send.done
    pair[1].receive(0, 0, 0, got := buffer(65536), soon())
    assert bytes(got) == payload(65536, 1)
    until(lambda: send.done)
    time.sleep(0.05)
    before = len(looks)
    time.sleep(0.1)
    assert len(looks) <= before + 1
    pair[1].send(0, 0, 0, memoryview(bytes(8)), soon())
    thread.join(PATIENCE)


def test_one_that_only_sends_learns_of_credit(pair):
    got = buffer(8)
    for number in range(3 * frames.BUDGET // frames.OVERHEAD):
        assert pair[0].post_send(1, 0, 0, memoryview(number.to_bytes(8, "little"))).done
        pair[1].receive(0, 0, 0, got, soon())
        assert int.from_bytes(got, "little") == number


def test_a_connection_that_ends_is_told_once():
    lost = []
    one, other = socket.socketpair()
    end = Endpoint({1: one}, lost=lambda rank, error: lost.append((rank, str(error))))
    other.close()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            end.receive(1, 0, 0, buffer(4), time.monotonic() + 0.05)
    assert lost == [(1, "the connection was closed by its other end")]


@pytest.mark.parametrize("what", ["send", "receive"])
def test_several_threads_wait_for_one_operation(pair, what):
    """And a further one for another: whoever leads, all are told."""
    if what == "send":
        operation = pair[0].post_send(1, 0, 0, memoryview(bytes(1 << 20)))
    else:
        operation = pair[0].post_receive(1, 0, 0, buffer(8))
    end = pair[0]
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(end.wait, operation, soon()) for _ in range(3)]
        other = threads.submit(end.receive, 1, 0, 1, buffer(8), soon())
        until(lambda: sum(map(len, end._followers.values())) == 3)
        if what == "send":
            pair[1].receive(0, 0, 0, buffer(1 << 20), soon())
        else:
            pair[1].send(0, 0, 0, memoryview(bytes(8)), soon())
        for each in waits:
            each.result(PATIENCE / 3)
        pair[1].send(0, 0, 1, memoryview(bytes(8)), soon())
        other.result(PATIENCE / 3)
    assert not end._followers
    assert end._leader is None


def test_one_of_several_that_wait_for_an_operation_gives_up(pair):
    """A follower whose time is over does not take the lead from the thread that has it."""
    end = pair[0]
    operation = end.post_receive(1, 0, 0, buffer(8))
    with ThreadPoolExecutor(2) as threads:
        leads = threads.submit(end.wait, operation, soon())
        until(lambda: end._led is operation)
        leader = end._leader
        follows = threads.submit(end.wait, operation, soon())
        until(lambda: end._followers)
        with pytest.raises(TimeoutError):
            end.wait(operation, time.monotonic() + 0.05)
        assert (end._leader, end._led) == (leader, operation)
        assert len(end._followers[operation]) == 1
        pair[1].send(0, 0, 0, memoryview(bytes(8)), soon())
        leads.result(PATIENCE / 3)
        follows.result(PATIENCE / 3)


@pytest.mark.parametrize("size", [4, 65536])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_as_the_lead_is_given_up_leaves_no_thread_waiting(pair, monkeypatch, size, when):
    """Else all that is received later would wait for a leader that is gone."""
    give_up = pair[0]._give_up_lead

    def interrupted():
        monkeypatch.undo()
        if when == "after":
            give_up()
        raise KeyboardInterrupt

    monkeypatch.setattr(pair[0], "_give_up_lead", interrupted)
    receiving = threading.Timer(0.1, pair[1].send, (0, 0, 0, buffer(size), soon()))
    receiving.start()
    with pytest.raises(KeyboardInterrupt):
        pair[0].receive(1, 0, 0, buffer(size), soon())
    receiving.join()
    assert pair[0]._leader is None
    with pytest.raises(ConnectionAbortedError, match="interrupted by KeyboardInterrupt"):
        pair[0].receive(1, 0, 0, buffer(size), soon())


@pytest.mark.parametrize("limit", [1e12, float("inf")])
def test_a_deadline_in_a_million_years(pair, limit):
    operation = pair[0].post_receive(1, 0, 0, buffer(4))
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(pair[0].wait, operation, limit) for _ in range(2)]
        until(lambda: pair[0]._followers)
        pair[1].send(0, 0, 0, buffer(4), soon())
        assert [each.result(PATIENCE) for each in waiting] == [None, None]


def test_when_over_keeps_every_call(pair):
    operation = pair[0].post_receive(1, 0, 0, buffer(8))
    told = []
    calls = [lambda number=number: told.append(number) for number in range(4)]
    for call in calls[:3]:
        assert pair[0].when_over(operation, call)
    pair[0].forget(operation, calls[1])
    pair[0].forget(operation, calls[3])  # which was never kept
    pair[1].send(0, 0, 0, memoryview(bytes(8)), soon())
    pair[0].wait(operation, soon())
    assert told == [0, 2]
    assert not pair[0].when_over(operation, calls[1])
    pair[0].forget(operation, calls[0])
    assert not pair[0]._awaited


@pytest.mark.parametrize("size", [4, 5000, 200_000, 1 << 20])
def test_what_owns_a_buffer_is_kept_until_its_operation_is_over(pair, size):
    """Also where a short way has taken a part of the message only."""

    class Owner:
        pass

    source, target = Owner(), Owner()
    refs = weakref.ref(source), weakref.ref(target)
    send = receive = None
    try:
        pair[0].send(1, 0, 0, memoryview(payload(size, 1)), time.monotonic() + 0.02, keep=source)
    except TimeoutError:
        send = refs[0]
    receive = pair[1].post_receive(0, 0, 1, buffer(size), keep=target)
    del source, target
    assert refs[1]() is receive.keep is not None
    assert (refs[0]() is None) is (send is None)
    with ThreadPoolExecutor(1) as thread:
        writes = thread.submit(pair[0].receive, 1, 0, 9, buffer(1), soon())
        pair[1].receive(0, 0, 0, got := buffer(size), soon())
        assert bytes(got) == payload(size, 1)
        pair[0].send(1, 0, 1, memoryview(b""), soon())  # of another size: that ends it, too
        pair[1].wait(receive, soon())
        pair[1].send(0, 0, 9, memoryview(b"x"), soon())
        writes.result(PATIENCE)
    assert [each() for each in refs] == [None, None]


@pytest.mark.parametrize("call", ["send", "receive", "a wrong size"])
def test_an_error_lets_go_of_what_its_caller_used(pair, call):
    """Also where the lane lives on: an exception that it raised holds the frames that it went through."""

    class Used:
        pass

    def use(text):
        used.append(weakref.ref(mine := Used()))
        if call == "send":
            pair[0].send(1, 0, 0, memoryview(text), soon(), keep=mine)
        else:
            pair[0].receive(1, 0, 0, buffer(4), soon(), keep=mine)

    used = []
    if call == "a wrong size":
        pair[1].send(0, 0, 0, memoryview(b"other"), soon())
    else:
        pair[0].fail(ConnectionError("the world is over"))
    gc.disable()  # what only the collector frees counts as held
    try:
        with contextlib.suppress(ConnectionError, SizesDifferError):
            use(b"text")
        assert used[0]() is None
    finally:
        gc.enable()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), timeout=PATIENCE)
        other, _ = server.accept()
    one.settimeout(None)
    return Endpoint({1: one}), Endpoint({0: other})


def settled():
    return not any(each.name == "m8d-linger" for each in threading.enumerate())


@pytest.mark.parametrize("other_sends", ["before", "all the time", "all the time, without looking"])
@pytest.mark.parametrize("reads", ["at once", "late"])
def test_what_was_sent_before_the_end_arrives(other_sends, reads, monkeypatch):
    """Over TCP, which drops what is on its way if an end is closed with unread bytes."""
    monkeypatch.setattr(graceful_close, "LINGER", 4 * PATIENCE)  # it does not take that long
    ends = tcp_pair()
    error, size = ConnectionError("over"), 20_000
    for number in range(30):  # that stay unread, at the end that is closed
        ends[1].post_send(0, 0, 0, memoryview(payload(size, number)))
    sent = 0
    while ends[0].post_send(1, 0, 0, memoryview(payload(size, sent))).done and sent < 150:
        sent += 1
    assert sent >= 10
    stop = threading.Event()

    def goes_on():
        while not stop.is_set():
            ends[1].post_send(0, 0, 0, memoryview(bytes(100)))

    sender = threading.Thread(target=goes_on, daemon=True)
    if other_sends != "before":
        sender.start()
    began = time.monotonic()
    ends[0].fail(error)
    assert time.monotonic() - began < PATIENCE / 2
    if reads == "late":
        time.sleep(0.1)
    if other_sends == "all the time":
        stop.set()
    got = buffer(size)
    for number in range(sent):
        ends[1].receive(0, 0, 0, got, soon())
        assert bytes(got) == payload(size, number)
    stop.set()
    until(settled)
    ends[1].fail(error)


def test_the_end_of_one_that_is_not_read_from_waits_for_nothing(monkeypatch):
    """Its connection is closed after a while."""
    monkeypatch.setattr(graceful_close, "LINGER", 4.0)
    ends = tcp_pair()
    while ends[0].post_send(1, 0, 0, memoryview(bytes(200_000))).done:
        pass
    connection = ends[0]._net.sockets[1]
    began = time.monotonic()
    ends[0].fail(ConnectionError("over"))
    assert connection.fileno() >= 0  # `fail` is back before that while is over
    until(settled)
    assert time.monotonic() - began >= 4.0
    assert connection.fileno() < 0
    ends[1].fail(ConnectionError("over"))


def test_an_end_without_a_thread_left_closes_its_connections_at_once(monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    ends = tcp_pair()
    while ends[0].post_send(1, 0, 0, memoryview(bytes(200_000))).done:
        pass
    connection = ends[0]._net.sockets[1]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        ends[0].fail(ConnectionError("over"))
    assert connection.fileno() < 0
    ends[1].fail(ConnectionError("over"))


def test_a_connection_whose_other_end_is_gone_is_closed_at_once(monkeypatch):
    monkeypatch.setattr(graceful_close, "LINGER", 4 * PATIENCE)
    ends = tcp_pair()
    while ends[0].post_send(1, 0, 0, memoryview(bytes(200_000))).done:
        pass
    ends[0].fail(ConnectionError("over"))
    assert not settled()
    ends[1].fail(ConnectionError("over"))
    until(settled)


def test_a_connection_without_bytes_on_their_way_is_closed_at_once():
    ends = tcp_pair()
    ends[0].send(1, 0, 0, memoryview(bytes(8)), soon())
    ends[1].receive(0, 0, 0, buffer(8), soon())
    connections = [each._net.sockets[1 - rank] for rank, each in enumerate(ends)]
    until(lambda: not graceful_close._on_their_way(connections[0]))
    for end, connection in zip(ends, connections, strict=True):
        end.fail(ConnectionError("over"))
        assert connection.fileno() == -1


@pytest.mark.parametrize("other_writes", [False, True])
@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_messages_are_there_after_the_connection_was_closed(over, other_writes):
    """With unread bytes, and although writing to it fails before they are read."""
    lost = []
    ends = tcp_pair() if over == "tcp" else mesh(2)
    ends[1]._net._lost = lambda rank, error: lost.append(rank)
    ends[1].post_send(0, 0, 0, memoryview(bytes(1000)))
    for number in range(2):
        assert ends[0].post_send(1, 0, 0, memoryview(payload(1000, number))).done
    until(lambda: not graceful_close._on_their_way(ends[0]._net.sockets[1]))
    ends[0].fail(ConnectionError("over"))
    for _ in range(3 if other_writes else 0):
        ends[1].post_send(0, 0, 0, memoryview(bytes(1000)))
    assert lost == [0] * other_writes
    for number in range(2):
        ends[1].receive(0, 0, 0, got := buffer(1000), soon())
        assert bytes(got) == payload(1000, number)
    with pytest.raises(TimeoutError):
        ends[1].receive(0, 0, 0, got, time.monotonic() + 0.05)
    assert lost == [0]
    ends[1].fail(ConnectionError("over"))


def test_the_end_is_told_at_once_although_a_loop_holds_the_connection():
    lost = []
    ends = tcp_pair()
    ends[1]._net._lost = lambda rank, error: lost.append(rank)
    ends[0].hold(1)
    connection = ends[0]._net.sockets[1]
    ends[0].fail(ConnectionError("over"))
    with pytest.raises(TimeoutError):
        ends[1].receive(0, 0, 0, buffer(8), time.monotonic() + 0.05)
    assert lost == [0]
    assert connection.fileno() >= 0
    ends[0].let_go(1)
    assert connection.fileno() == -1
    ends[1].fail(ConnectionError("over"))


@pytest.mark.parametrize("mesh_size", [2, 3])
def test_a_member_that_is_lost_is_waited_for_until_the_end(members, mesh_size):
    """Whatever is posted for it; the thread that leads sleeps."""
    ends = members(mesh_size)
    end, lost = ends[0], []
    end._net._lost = lambda rank, error: lost.append(rank)
    before = [end.post_receive(1, 0, 1, buffer(8))]
    ends[1].fail(ConnectionError("gone"))
    with pytest.raises(TimeoutError):
        end.receive(1, 0, 0, buffer(8), time.monotonic() + 0.05)
    assert lost == [1]
    with pytest.raises(TimeoutError):
        end.send(1, 0, 0, memoryview(b"x"), time.monotonic() + 0.01)
    operations = [
        *before,
        *(end.post_send(1, 0, 0, memoryview(bytes(size))) for size in (0, 8, 70_000, 1 << 20)),
        *(end.post_receive(source, 0, 0, buffer(8)) for source in (1, None)),
    ]
    for _ in range(10_000):  # more than the budget: they are held
        end.post_send(1, 0, 0, memoryview(b"x"))
    with pytest.raises(TimeoutError):
        end.send(1, 0, 0, memoryview(b"x"), time.monotonic() + 0.05)
    assert end.cancel(again := end.post_receive(1, 0, 0, buffer(8)))
    assert again.error is None

    def waits(operation):
        with contextlib.suppress(ConnectionError):
            end.wait(operation, soon())

    thread, looks = led(end, lambda: waits(operations[0]))
    time.sleep(0.1)
    assert len(looks) == 1
    end.post_send(1, 0, 0, memoryview(b"x"))
    time.sleep(0.05)
    assert len(looks) <= 2
    if mesh_size == 3:
        ends[2].send(0, 0, 5, memoryview(payload(8, 1)), soon())
        end.receive(2, 0, 5, got := buffer(8), soon())
        assert bytes(got) == payload(8, 1)
    error = ConnectionError("the world broke")
    assert not any(each.done for each in operations)
    end.fail(error)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert all(each.error is error for each in operations)


def test_a_member_that_is_lost_is_awaited_until_the_end(pair, run):
    async def talk():
        watch = Watch(pair[0], asyncio.get_running_loop())
        looks, ready = [], watch._ready
        watch._ready = lambda rank: (looks.append(None), ready(rank))
        first = asyncio.ensure_future(receive(watch, pair[0], 1, 8))
        await asyncio.sleep(0.02)
        pair[1].fail(ConnectionError("gone"))
        await asyncio.sleep(0.02)
        looks.clear()
        second = asyncio.ensure_future(send(watch, pair[0], 1, bytes(1 << 20)))
        await asyncio.sleep(0.05)
        assert not pair[0]._net.sockets
        assert not looks
        assert not first.done()
        assert not second.done()
        pair[0].fail(ConnectionError("the world broke"))
        with pytest.raises(ConnectionError, match="the world broke"):
            await first
        with pytest.raises(AssertionError):  # `send` checks that there is no error
            await second
        assert not watch._awaited

    run(talk())


def test_ctrl_c(tmp_path):
    """In a process of its own: the call is left at once, and the endpoint works afterwards."""
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, socket, time, threading\n"
        "from multiworld._net.lane.endpoint import Endpoint\n"
        "one, other = socket.socketpair()\n"
        "mine, theirs = Endpoint({1: one}), Endpoint({0: other})\n"
        "for size in (4, 1 << 20):\n"
        "    try:\n"
        "        print('waits', flush=True)\n"
        "        mine.receive(1, 0, 0, memoryview(bytearray(size)), time.monotonic() + 60)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "    threading.Thread(target=theirs.send, args=(0, 0, 0, bytes(size), time.monotonic() + 60)).start()\n"
        "    mine.receive(1, 0, 0, memoryview(bytearray(size)), time.monotonic() + 60)\n"
        "    print('works', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(2):
            assert process.stdout.readline() == "waits\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "works\n"
        assert process.wait(PATIENCE) == 0


FORKS = """
import gc, os, socket, sys, threading, time
registered, register = [], os.register_at_fork

def noted(**hooks):
    registered.extend(each for each in hooks.values() if each.__module__.startswith("multiworld"))
    register(**hooks)

os.register_at_fork = noted
from multiworld._net.lane import wakes
from multiworld._net.lane.background import background
from multiworld._net.lane.endpoint import Endpoint
assert not registered, "an import has no effect"

def pair():
    one, other = socket.socketpair()
    return Endpoint({1: one}), Endpoint({0: other})

def soon():
    return time.monotonic() + 20

def works(ends):
    got = memoryview(bytearray(8))
    receive = ends[1].post_receive(0, 0, 0, got)
    background.take_on(ends[1], receive)
    ends[0].send(1, 0, 0, memoryview(b"eight by"), soon())
    deadline = soon()
    while not receive.done:  # the thread of this process reads it
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert bytes(got) == b"eight by"

ends = pair()
works(ends)
waits = ends[1].post_receive(0, 0, 7, memoryview(bytearray(8)))
background.take_on(ends[1], waits)  # and is under way in the fork
time.sleep(0.02)
mine = wakes.mine()
pid = os.fork()
if not pid:
    code = 1
    try:
        os.eventfd_write(wakes.mine(), 1)
        ends[1]._lock.acquire(blocking=False)  # as another thread of the parent may have it
        for each in ends:
            each.fail(ConnectionError("over"))
        works(fresh := pair())
        for each in fresh:
            each.fail(ConnectionError("over"))
        del ends, each, waits, fresh
        gc.collect()  # of the parent's loop and tasks nothing is closed, and nobody complains
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(pid, 0)[1] == 0
try:
    os.eventfd_read(mine)
except BlockingIOError:
    print("its own descriptor")
ends[0].send(1, 0, 7, memoryview(bytes(8)), soon())
ends[1].wait(waits, soon())
works(ends)
print("works")
assert len(registered) == 2
for each in ends:
    each.fail(ConnectionError("over"))
"""


def test_a_forked_process_has_a_thread_and_descriptors_of_its_own(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FORKS)
    done = subprocess.run(
        [sys.executable, "-W", "always", program],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == "its own descriptor\nworks\n"


# -- awaited ----------------------------------------------------------------------------------------------------------


def loops():
    try:
        import uvloop
    except ImportError:
        return [pytest.param(asyncio.new_event_loop, id="asyncio")]
    return [
        pytest.param(asyncio.new_event_loop, id="asyncio"),
        pytest.param(uvloop.new_event_loop, id="uvloop"),
    ]


@pytest.fixture(params=loops())
def run(request):
    loop = request.param()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, PATIENCE))
    loop.close()


async def send(watch, end, peer, data, tag=0):
    operation = end.post_send(peer, 0, tag, memoryview(data))
    await watch.until_over(operation)
    assert operation.error is None


async def receive(watch, end, source, size, tag=0):
    operation = end.post_receive(source, 0, tag, got := buffer(size))
    await watch.until_over(operation)
    if operation.error is not None:
        raise operation.error
    return bytes(got)


@pytest.mark.parametrize("size", SIZES)
def test_awaited_messages(pair, run, size):
    async def talk():
        mine, theirs = (Watch(each, asyncio.get_running_loop()) for each in pair)
        for number in range(3):
            data = payload(size, number)
            _, got = await asyncio.gather(send(mine, pair[0], 1, data), receive(theirs, pair[1], 0, size))
            assert got == data

    run(talk())


def test_many_awaited_at_once(pair, run):
    async def talk():
        mine, theirs = (Watch(each, asyncio.get_running_loop()) for each in pair)
        tags = range(50)
        got = await asyncio.gather(
            *(receive(theirs, pair[1], 0, 100_000, tag) for tag in tags),
            *(send(mine, pair[0], 1, payload(100_000, tag), tag) for tag in tags),
        )
        assert got[:50] == [payload(100_000, tag) for tag in tags]

    run(talk())
    assert not pair[0]._net._held
    assert list(pair[0]._net.on_blocked) == [pair[0]]


def test_awaited_beside_a_thread_that_leads(pair, run):
    async def talk():
        watch = Watch(pair[1], asyncio.get_running_loop())
        with ThreadPoolExecutor(1) as thread:
            blocked = thread.submit(pair[1].receive, 0, 0, 1, buffer(8), soon())
            waits = asyncio.ensure_future(receive(watch, pair[1], 0, 1 << 20))
            await asyncio.sleep(0.05)
            threading.Thread(
                target=pair[0].send, args=(1, 0, 0, memoryview(payload(1 << 20, 1)), soon()), daemon=True
            ).start()
            assert await waits == payload(1 << 20, 1)
            pair[0].send(1, 0, 1, memoryview(bytes(8)), soon())
            await asyncio.wrap_future(blocked)

    run(talk())


def test_a_loop_that_is_run_on_in_another_thread_is_woken(pair):
    """By its first thread, too, which reads its message."""
    loop = asyncio.new_event_loop()
    watch = Watch(pair[1], loop)
    watch._look = lambda *_: None  # it does not read by itself
    first, second = (pair[1].post_receive(0, 0, tag, buffer(8)) for tag in range(2))

    def arrives(tag, operation):
        pair[0].send(1, 0, tag, memoryview(bytes(8)), soon())
        pair[1].wait(operation, soon())

    loop.call_later(0.01, arrives, 0, first)
    loop.run_until_complete(watch.until_over(first))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    awaited = asyncio.run_coroutine_threadsafe(watch.until_over(second), loop)
    until(lambda: second in pair[1]._awaited)
    time.sleep(0.02)  # it sleeps
    arrives(1, second)
    assert awaited.result(PATIENCE / 3)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE)
    loop.close()


def test_awaiting_what_the_connection_could_not_take(pair, run):
    async def talk():
        mine, theirs = (Watch(each, asyncio.get_running_loop()) for each in pair)
        data = payload(65536, 1)
        sends = [pair[0].post_send(1, 0, 0, memoryview(data)) for _ in range(2)]
        assert pair[0]._net.blocked
        waits = asyncio.gather(*(mine.until_over(each) for each in sends))
        got = [await receive(theirs, pair[1], 0, len(data)) for _ in sends]
        await waits
        assert got == [data] * 2

    run(talk())


def test_a_loop_writes_what_others_posted_and_then_sleeps(pair, run):
    async def talk():
        watch = Watch(pair[0], asyncio.get_running_loop())
        looks, ready = [], watch._ready
        watch._ready = lambda rank: (looks.append(None), ready(rank))
        waits = asyncio.ensure_future(receive(watch, pair[0], 1, 8))
        await asyncio.sleep(0.02)
        with ThreadPoolExecutor(2) as threads:
            posted = threads.submit(pair[0].post_send, 1, 0, 0, memoryview(payload(65536, 1)))
            assert not posted.result().done
            got = buffer(65536)
            await asyncio.wrap_future(threads.submit(pair[1].receive, 0, 0, 0, got, soon()))
            assert bytes(got) == payload(65536, 1)
            await asyncio.sleep(0.05)
            assert posted.result().done
        before = len(looks)
        await asyncio.sleep(0.1)
        assert len(looks) <= before + 1
        pair[1].send(0, 0, 0, memoryview(bytes(8)), soon())
        await waits

    run(talk())


def test_the_end_is_heard_by_a_loop(pair, run):
    async def talk():
        watch = Watch(pair[1], asyncio.get_running_loop())
        waits = asyncio.ensure_future(receive(watch, pair[1], 0, 8))
        await asyncio.sleep(0.02)
        threading.Thread(target=pair[1].fail, args=(ConnectionError("the world broke"),)).start()
        with pytest.raises(ConnectionError, match="the world broke"):
            await waits

    run(talk())


def test_a_cancelled_receive_loses_nothing(pair, run):
    async def talk():
        watch = Watch(pair[1], asyncio.get_running_loop())
        operation = pair[1].post_receive(0, 0, 0, buffer(8))
        waits = asyncio.ensure_future(watch.until_over(operation))
        await asyncio.sleep(0.02)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert pair[1].cancel(operation)
        pair[0].send(1, 0, 0, memoryview(payload(8, 4)), soon())
        assert await receive(watch, pair[1], 0, 8) == payload(8, 4)

    run(talk())


@pytest.mark.parametrize("size", [8, 1 << 20])
def test_a_task_is_cancelled_when_its_message_is_there(pair, run, size):
    """Before it goes on: the message is there for the next, which a thread has waited for the short way."""

    async def talk():
        watch = Watch(pair[1], asyncio.get_running_loop())
        operation = pair[1].post_receive(0, 0, 0, got := buffer(size))
        waits = asyncio.ensure_future(watch.until_over(operation))
        await asyncio.sleep(0.02)
        with ThreadPoolExecutor(2) as threads:
            sends = threads.submit(pair[0].send, 1, 0, 0, memoryview(payload(size, 4)), soon())
            while not operation.done:
                watch._ready(0)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            assert not pair[1].cancel(operation)
            following = threads.submit(pair[1].receive, 0, 0, 0, again := buffer(size), soon())
            until(lambda: pair[1]._leader is not None)
            pair[1].take_back(operation)
            got[:] = bytes(size)
            following.result(PATIENCE / 3)
            sends.result(PATIENCE)
        assert bytes(again) == payload(size, 4)

    run(talk())


def test_descriptors_come_back(run):
    def once():
        ends = mesh(2)

        async def talk():
            watch = Watch(ends[1], asyncio.get_running_loop())
            waits = asyncio.ensure_future(receive(watch, ends[1], 0, 8))
            await asyncio.sleep(0)
            for each in ends:
                each.fail(ConnectionError("over"))
            with pytest.raises(ConnectionError):
                await waits

        run(talk())

    once()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        once()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


# -- posted -----------------------------------------------------------------------------------------------------------


def test_posted_operations_get_on_by_themselves(pair):
    background = Background()
    sends, receives = [], []
    for number in range(3):
        sends.append(pair[0].post_send(1, 0, number, memoryview(payload(3 << 20, number))))
        background.take_on(pair[0], sends[-1])
    time.sleep(0.1)
    assert not any(each.done for each in sends)
    for number in range(3):
        receives.append(pair[1].post_receive(0, 0, number, buffer(3 << 20)))
        background.take_on(pair[1], receives[-1])
    until(lambda: all(each.done for each in (*sends, *receives)))
    assert [bytes(each.view) for each in receives] == [payload(3 << 20, number) for number in range(3)]
    until(lambda: background._asleep)
    again = pair[1].post_receive(0, 0, 0, buffer(8))
    background.take_on(pair[1], again)
    pair[0].send(1, 0, 0, memoryview(payload(8, 9)), soon())
    until(lambda: again.done)


def test_a_thread_that_cannot_start_is_tried_again_with_the_next_operation(pair, monkeypatch):
    def none_left(*_):
        raise RuntimeError("can't start new thread")

    background = Background()
    receives = [pair[1].post_receive(0, 0, tag, buffer(8)) for tag in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        background.take_on(pair[1], receives[0])
    background.take_on(pair[1], receives[1])
    for tag in range(2):
        pair[0].send(1, 0, tag, memoryview(payload(8, tag)), soon())
    until(lambda: all(each.done for each in receives))
    until(lambda: background._loop is None)


def in_last_turn(background, call):
    """Make `call` in the loop of the background, once that has ended, in the turn in which it does."""
    loop, over = background._loop, threading.Event()

    def turn():
        background._end()
        try:
            assert background._loop is None
            call()
        finally:
            over.set()

    loop.call_soon_threadsafe(turn)
    assert over.wait(PATIENCE)


def idle(background, end):
    background.take_on(end, end.post_send(1, 0, 99, memoryview(b"x")))
    until(lambda: not background._posted)


def test_a_loop_that_has_ended_takes_no_operation_from_the_next_one(pair):
    """Another thread may post between its end and a look that is due in the same turn."""
    background, receives = Background(), [pair[1].post_receive(0, 0, tag, buffer(8)) for tag in range(2)]
    idle(background, pair[0])

    def posted_then_looks():
        background._posted.append((pair[1], receives[0]))  # as `take_on`, which then starts the next loop
        background._look(0)

    in_last_turn(background, posted_then_looks)
    background.take_on(pair[1], receives[1])
    for tag in range(2):
        pair[0].send(1, 0, tag, memoryview(bytes(8)), soon())
    until(lambda: all(each.done for each in receives))
    until(lambda: not background._tasks)


def test_a_loop_that_has_ended_does_not_end_the_next_one(pair):
    """Two requests to end may be due in one turn."""
    background = Background()
    idle(background, pair[0])
    following = []

    def starts_the_next_then_ends():
        idle(background, pair[0])
        following.append(background._loop)
        background._end()

    in_last_turn(background, starts_the_next_then_ends)
    assert following == [background._loop]
    background.dismiss()
    until(following[0].is_closed)


def test_an_endpoint_goes_when_its_operations_are_over(members):
    """The background thread keeps nothing of it."""
    background, ends = Background(), members(2)
    for each in (ends[1].post_receive(0, 0, tag, buffer(8)) for tag in range(2)):
        background.take_on(ends[1], each)
    until(lambda: len(background._tasks) == 2)
    assert len(background._watches) == 1
    for tag in range(2):
        ends[0].send(1, 0, tag, memoryview(bytes(8)), soon())
    until(lambda: not background._tasks)
    assert not background._watches


def test_a_task_that_awaits_nothing_just_now_keeps_its_place(pair):
    """As a collective between two of its steps: others that end then take no descriptor from it."""
    background, gate, over = Background(), threading.Event(), threading.Event()
    receives = [pair[1].post_receive(0, 0, tag, buffer(8)) for tag in range(3)]

    class Steps:
        done = False

        async def progress(self, watch):
            await asyncio.to_thread(gate.wait, PATIENCE)
            await watch.until_over(receives[2])
            over.set()

    background.take_on(pair[1], Steps())
    for tag in range(2):  # the first one ends while the task awaits nothing, the second one while it does
        background.take_on(pair[1], receives[tag])
        until(lambda: len(background._tasks) == 2 and receives[tag] in pair[1]._awaited)  # noqa: B023
        if tag:
            gate.set()
            until(lambda: receives[2] in pair[1]._awaited)
        pair[0].send(1, 0, tag, memoryview(bytes(8)), soon())
        until(lambda: len(background._tasks) == 1)
    pair[0].send(1, 0, 2, memoryview(bytes(8)), soon())
    assert over.wait(PATIENCE)
    until(lambda: not background._tasks)
    assert not background._watches
    assert not background._users


def test_the_thread_stays_awake_while_operations_are_posted(pair):
    background = Background()
    over = pair[0].post_send(1, 0, 0, memoryview(b"x"))
    looked, end = 0, time.monotonic() + PATIENCE
    while looked < 40 and time.monotonic() < end:
        began = time.monotonic()
        background.take_on(pair[0], over)
        time.sleep(LOOK_EVERY)
        asleep = background._asleep
        if time.monotonic() - began < 24 * LOOK_EVERY:  # else it may be, and rightly
            looked += 1
            assert not asleep
    assert looked == 40
    until(lambda: background._asleep)


def test_a_posted_operation_can_be_awaited(pair, run):
    """By several tasks, of which one is cancelled, beside the background thread."""
    background = Background()

    async def talk():
        watch = Watch(pair[1], asyncio.get_running_loop())
        posted = pair[1].post_receive(0, 0, 0, buffer(8))
        background.take_on(pair[1], posted)
        first, second, third = (asyncio.ensure_future(watch.until_over(posted)) for _ in range(3))
        await asyncio.sleep(10 * LOOK_EVERY)
        second.cancel()
        await asyncio.sleep(0)
        pair[0].send(1, 0, 0, memoryview(payload(8, 1)), soon())
        await asyncio.gather(first, third)
        assert posted.done

    run(talk())
    until(lambda: not background._tasks)
    assert not pair[1]._awaited


def test_a_loop_that_was_closed_ends_nothing(pair):
    """Its tasks are not told of what is over; the lane goes on."""
    loop = asyncio.new_event_loop()
    watch = Watch(pair[1], loop)
    operation = pair[1].post_receive(0, 0, 0, buffer(8))
    task = loop.create_task(watch.until_over(operation))
    loop.run_until_complete(asyncio.sleep(0.01, None))
    loop.close()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pair[0].send, 1, 0, 0, memoryview(payload(8, 1)), soon()).result(PATIENCE)
        thread.submit(pair[1].wait, operation, soon()).result(PATIENCE)
    assert bytes(operation.view) == payload(8, 1)
    with contextlib.suppress(RuntimeError):  # its loop is closed
        task.get_coro().close()
    task._log_destroy_pending = False


def test_a_posted_operation_can_be_waited_for(pair):
    background = Background()
    posted = pair[1].post_receive(0, 0, 0, buffer(8))
    background.take_on(pair[1], posted)
    time.sleep(10 * LOOK_EVERY)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(pair[1].wait, posted, soon())
        time.sleep(0.02)
        pair[0].send(1, 0, 0, memoryview(payload(8, 1)), soon())
        waits.result(PATIENCE)
    until(lambda: not background._tasks)
