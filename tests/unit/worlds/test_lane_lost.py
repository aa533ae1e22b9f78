"""A lane's connection that ends while the process has no thread left: the world breaks with the member that it was."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

from multiworld._c10d import waiter_pool
from multiworld._core.state_machine import Broke
from multiworld._join import lane
from multiworld._net.lane.meeting import Met
from multiworld.events import State


def refused(_):
    raise RuntimeError("can't start new thread")


def test_a_lost_connection_is_reported_by_the_next_thread_that_there_is(monkeypatch):
    pool = waiter_pool.Pool(name="the-test")
    monkeypatch.setattr(lane, "ending", pool)
    mine, theirs = socket.socketpair()
    monkeypatch.setattr(lane, "meet", lambda *_, **__: Met({1: mine}, {}))
    broke, told = [], threading.Event()

    def apply(event):
        broke.append(event)
        told.set()

    endpoint = lane.connect(
        object(),
        SimpleNamespace(lane_version=1, size=2, rank=0),
        SimpleNamespace(read_with=lambda _: None, breakage_for=lambda detail, ranks: (detail, ranks)),
        SimpleNamespace(state=State.ACTIVE, apply=apply),
        deadline=time.monotonic() + 10,
        check=lambda: None,
    )
    try:
        theirs.close()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            endpoint.ready(1)
        assert endpoint._core.error is None
        assert not broke
        pool.run(lambda: None)
        assert told.wait(60)
    finally:
        endpoint.fail(ConnectionError("the test is over"))
        pool.dismiss()
    (event,) = broke
    assert isinstance(event, Broke)
    assert event.breakage[1] == (1,)
