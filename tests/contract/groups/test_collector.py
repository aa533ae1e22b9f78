"""Garbage is not collected in a thread that has a descriptor table of its own."""

from __future__ import annotations

import datetime as dt
import gc
import socket
import threading
import time

import pytest
import torch.distributed as dist
from kits.contract.worldkit import free_port

from multiworld._net import descriptor_table
from multiworld._net.stores import server as servers


class Watched:
    """Where collections begin, and whether the thread with a table of its own could have begun one."""

    def __init__(self):
        self.collected = []
        self.apart = None
        gc.set_threshold(0)
        # Garbage that only the collector destroys: a server of torch's own, with a thread that it has to wake.
        circle = [
            dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=dt.timedelta(seconds=9)
            )
        ]
        circle.append(circle)
        gc.callbacks.append(
            lambda phase, _: phase == "start" and self.collected.append(threading.get_ident())
        )

    def begins(self):
        """In that thread: from now on each allocation begins a collection."""
        self.apart = threading.get_ident()
        gc.set_threshold(1, 1, 1)

    def told(self):
        return {"apart": self.apart, "collected": self.collected, "enabled": gc.isenabled()}


def serves(me):
    watched, fill = Watched(), servers._fill

    def isolated(top):
        watched.begins()
        fill(top)

    servers._fill = isolated
    servers.StoreServer(socket.AF_INET, ("127.0.0.1", free_port())).close()
    me.emit("told", **watched.told())


def serves_as_before_libuv(me):
    servers._libuv_takes_a_socket = lambda: False
    serves(me)


def closes_first(me):
    watched, isolate = Watched(), descriptor_table.isolate

    def isolated(end):
        watched.begins()
        return isolate(end)

    descriptor_table.isolate = isolated
    table = descriptor_table.IsolatedTable.start()
    assert table is not None
    assert table.opened()
    settled_by = time.monotonic() + 30
    while not table.settle():  # each allocation of that thread begins a collection: it may take long
        assert time.monotonic() < settled_by
    assert table.close(10)
    me.emit("told", **watched.told())


@pytest.mark.parametrize("program", [serves, serves_as_before_libuv, closes_first])
def test_a_store_that_is_garbage_is_destroyed_in_the_processs_own_threads(program, cast):
    member = cast.start(program)
    told = member.expect("told", timeout=30)
    assert told.collected, "nothing was collected at all"
    assert told.apart not in told.collected
    assert told.enabled
    member.expect("end")
