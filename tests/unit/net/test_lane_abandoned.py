"""Event loops that are closed while operations of a lane are awaited: their tasks are destroyed, in any thread."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from multiworld._net.lane import destroyed_tasks
from multiworld._net.lane.awaiting import Watch
from multiworld._net.lane.endpoint import Endpoint

PATIENCE = 120.0  # seconds; nothing takes that long when all is well


@pytest.fixture(autouse=True)
def no_words_of_asyncios(caplog):
    """ "Task was destroyed but it is pending!": so it is here."""
    caplog.set_level(logging.CRITICAL, "asyncio")


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    ends = Endpoint({1: one}), Endpoint({0: other})
    yield ends
    for each in ends:
        each.fail(ConnectionError("the test is over"))


def soon():
    return time.monotonic() + PATIENCE


def buffer():
    return memoryview(bytearray(8))


def awaits(end, operation, *, holds_itself=False):
    """Await an operation in a loop that is closed meanwhile; returns the loop's watch."""
    loop = asyncio.new_event_loop()
    watch = Watch(end, loop)

    async def until_over():
        held = asyncio.current_task() if holds_itself else None
        await watch.until_over(operation)
        del held

    async def begin():
        task = loop.create_task(until_over())
        await asyncio.sleep(0.01)
        assert not task.done()

    loop.run_until_complete(begin())
    loop.close()
    return watch


def ended(end):
    """Nothing is left of what was awaited."""
    until = soon()
    while end._awaited or end._on_reads or +end._net._held:
        assert time.monotonic() < until, (end._awaited, end._on_reads, end._net._held)
        time.sleep(0.001)


def in_time(call):
    """The result of a call that may hang."""
    executor = ThreadPoolExecutor(1)
    try:
        return executor.submit(call).result(PATIENCE)
    finally:
        executor.shutdown(wait=False)


@pytest.mark.parametrize("again", [1, 5])
def test_a_message_for_a_closed_loop_does_not_stop_the_endpoint(pair, again):
    receives = [pair[1].post_receive(0, 0, tag, buffer()) for tag in range(again)]
    for each in receives:
        awaits(pair[1], each)
    for tag in range(again):
        pair[0].send(1, 0, tag, memoryview(b"for none"), soon())
    pair[0].send(1, 0, 99, memoryview(b"for some"), soon())
    got = buffer()
    in_time(lambda: pair[1].receive(0, 0, 99, got, soon()))
    assert bytes(got) == b"for some"
    assert all(each.done for each in receives)
    gc.collect()
    ended(pair[1])


def test_the_end_of_a_lane_is_no_harm(pair):
    awaits(pair[1], pair[1].post_receive(0, 0, 0, buffer()))
    in_time(lambda: pair[1].fail(ConnectionError("over")))
    gc.collect()
    ended(pair[1])
    assert not pair[1]._net._ended


def test_a_task_may_be_collected_where_the_lock_is_held(pair):
    """Where its own frames hold it, only the collector finds it."""
    watch = awaits(pair[1], pair[1].post_receive(0, 0, 0, buffer()), holds_itself=True)
    watch.give_up()
    assert watch._awaited
    del watch

    def collects():
        with pair[1]._lock:
            gc.collect()

    in_time(collects)
    ended(pair[1])


def test_a_loop_that_is_given_up_ends_its_tasks(pair):
    gc.disable()
    try:
        watch = awaits(pair[1], pair[1].post_receive(0, 0, 0, buffer()))
        assert pair[1]._awaited
        watch.give_up()
        ended(pair[1])
    finally:
        gc.enable()


def test_a_task_that_is_destroyed_may_use_the_lane(pair):
    """As its `finally` may: the message of its closed loop comes while the endpoint is locked."""
    sent, end, loop = [], pair[1], asyncio.new_event_loop()

    async def sends_at_last():
        try:
            await Watch(end, loop).until_over(end.post_receive(0, 0, 0, buffer()))
        finally:
            end.send(0, 0, 0, memoryview(b"the last"), soon())
            sent.append(True)

    async def begin():
        loop.create_task(sends_at_last())
        await asyncio.sleep(0.01)

    loop.run_until_complete(begin())
    loop.close()
    in_time(lambda: pair[0].send(1, 0, 0, memoryview(b"for none"), soon()))
    pair[0].send(1, 0, 9, memoryview(b"for some"), soon())
    in_time(lambda: pair[1].receive(0, 0, 9, buffer(), soon()))
    in_time(lambda: pair[0].receive(1, 0, 0, buffer(), soon()))
    ended(pair[1])


def test_what_is_left_is_done_in_another_thread():
    done, seen = threading.Event(), []

    def call():
        seen.append(threading.get_ident())
        done.set()

    destroyed_tasks.run(call)
    assert done.wait(PATIENCE)
    assert seen != [threading.get_ident()]


def test_a_process_without_threads_leaves_it(monkeypatch):
    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(destroyed_tasks._thread, "start_new_thread", none)
    destroyed_tasks.run(lambda: pytest.fail("no thread, no call"))


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_loop_that_cannot_look_leaves_nothing_behind(pair, monkeypatch, timeout):
    """The operation goes on, and is awaited anew."""

    def refused(*_):
        raise OSError("no more")

    async def main():
        loop = asyncio.get_running_loop()
        watch = Watch(pair[1], loop)
        receive = pair[1].post_receive(0, 0, 0, got := buffer())
        with monkeypatch.context() as patch:
            patch.setattr(loop, "add_reader", refused)
            with pytest.raises(OSError, match="no more"):
                await watch.until_over(receive, timeout, everywhere=True)
        kept = pair[1]._awaited, pair[1]._on_reads, watch._awaited, watch._waits, watch._descriptors
        assert not any(kept)
        assert not pair[1]._net.is_held(0)
        pair[0].send(1, 0, 0, memoryview(b"12345678"), soon())
        assert await watch.until_over(receive, 60.0)
        assert bytes(got) == b"12345678"

    asyncio.run(main())
