"""What a signal's handler may call in the middle of a call of its own thread: what need not wait for that."""

from __future__ import annotations

import time

import pytest
from kits.lanekit import InHandler, payload
from test_lane_endpoint import PATIENCE, buffer, mesh, soon

from multiworld._net.lane import waiting


@pytest.fixture
def pair():
    made = mesh(2)
    yield made
    for each in made:
        each.fail(ConnectionError("the test is over"))


@pytest.mark.parametrize("way", ["short", "posted"])
@pytest.mark.parametrize("what", ["irecv", "destroy"])
def test_a_handler_that_ends_what_its_own_thread_waits_for_wakes_it(pair, way, what):
    size = 8 if way == "short" else 8000

    def handler():
        if what == "destroy":
            pair[1].fail(ConnectionError("by the handler"))
            return
        pair[0].send(1, 0, 0, memoryview(payload(size, 1)), soon())
        pair[1].post_receive(None, 0, 5, buffer(8))  # reads all that has come

    InHandler(pair[1], handler)
    began = time.monotonic()
    if what == "destroy":
        with pytest.raises(ConnectionError, match="by the handler"):
            pair[1].receive(0, 0, 0, buffer(size), soon())
    else:
        pair[1].receive(0, 0, 0, got := buffer(size), soon())
        assert bytes(got) == payload(size, 1)
    assert time.monotonic() - began < PATIENCE / 2


REFUSED = "a signal's handler called an operation that has to wait for the one that it interrupts"
CALLS = {
    "recv": lambda end: end.receive(0, 0, 1, buffer(8), soon()),
    "large send": lambda end: end.send(0, 0, 0, buffer(4 << 20), soon()),
    "wait": lambda end: end.wait(end.post_receive(0, 0, 1, buffer(8)), soon()),
    "collective": lambda end: end.require_wait(),
}


@pytest.mark.parametrize("size", [8, 8000])
@pytest.mark.parametrize("call", list(CALLS))
def test_a_handler_that_would_wait_for_its_own_thread_is_refused(pair, call, size):
    """It would wait until its timeout. What it interrupts goes on, and what was refused has not begun."""

    def handler():
        with pytest.raises(RuntimeError, match=REFUSED):
            CALLS[call](pair[1])
        pair[1].send(0, 0, 2, memoryview(payload(8, 5)), soon())  # this need not wait
        pair[0].post_send(1, 0, 0, memoryview(payload(size, 1)))

    InHandler(pair[1], handler)
    pair[1].receive(0, 0, 0, got := buffer(size), soon())
    assert bytes(got) == payload(size, 1)
    pair[0].receive(1, 0, 2, got := buffer(8), soon())
    assert bytes(got) == payload(8, 5)
    assert not pair[0].has_come(0)
    if call == "recv":
        pair[0].send(1, 0, 1, memoryview(payload(8, 6)), soon())
        pair[1].receive(0, 0, 1, got := buffer(8), soon())
        assert bytes(got) == payload(8, 6)


@pytest.mark.parametrize(
    "call", [*CALLS.values(), lambda end: end.send(0, 0, 0, buffer(8), soon()),
             lambda end: end.post_send(0, 0, 0, buffer(8)), lambda end: end.post_receive(0, 0, 1, buffer(8))]
)  # fmt: skip
def test_a_handler_that_comes_while_its_thread_has_the_lock_is_refused(pair, call, monkeypatch):
    """Else nothing ever goes on."""
    monkeypatch.setattr(waiting, "_MOMENT", 0.01)
    raised = []

    def handler(*_):
        with pytest.raises(RuntimeError, match=REFUSED) as seen:
            call(pair[1])
        raised.append(seen.value)

    connection = pair[1]._net.sockets[0]
    pair[1]._net.sockets[0] = Handling(connection, handler)
    pair[1].send(0, 0, 0, memoryview(payload(8, 1)), soon())
    assert len(raised) == 1
    pair[0].receive(1, 0, 0, got := buffer(8), soon())
    assert bytes(got) == payload(8, 1)


class Handling:
    """A connection: a signal's handler runs once something was written to it."""

    def __init__(self, connection, handler):
        self._connection, self._handler = connection, handler

    def __getattr__(self, name):
        method = getattr(self._connection, name)
        if name != "sendmsg":
            return method

        def call(*args):
            result = method(*args)
            self._handler()
            return result

        return call


def test_a_call_that_interrupts_none_waits_for_the_lock(pair, monkeypatch):
    monkeypatch.setattr(waiting, "_MOMENT", 0.0)
    with pair[1]._lock:  # as another thread may have it
        pair[1]._refuse_in_the_middle()
