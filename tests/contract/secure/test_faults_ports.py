"""The watchdog's port while worlds are active: what is no member is dropped, and changes nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
import torch
from kits.contract.worldkit import SOON, outcome

import multiworld as mw


def member(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60, hang_timeout=30)
    stop, count, going = threading.Event(), [0], torch.ones(1)

    def run():
        while going.item():
            t = torch.tensor([count[0], w.rank])
            w.all_reduce(t)
            assert t.tolist() == [size * count[0], sum(range(size))]
            count[0] += 1
            going[0] = float(not stop.is_set())
            w.broadcast(going, 0)
            time.sleep(0.002)

    ended = []
    worker = threading.Thread(target=lambda: ended.append(outcome(run)), daemon=True)
    worker.start()
    endpoint = w.members[w.rank].endpoint
    me.emit("up", host=endpoint.host, port=endpoint.port)
    while me.hear() == "look":
        me.emit("looked", count=count[0], state=str(w.state), breakage=w.breakage)
    stop.set()
    worker.join(60)
    me.emit("done", ended=ended)
    me.hear()
    w.close()


def nothing(conn):
    """Connect and say nothing."""


def half_open(conn):
    conn.shutdown(socket.SHUT_WR)


def random_bytes(conn):
    conn.sendall(os.urandom(4096))


def a_web_browser(conn):
    conn.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def endless_zeros(conn):
    conn.sendall(bytes(1 << 20))


def drop_by_drop(conn):
    for value in os.urandom(40):
        conn.sendall(bytes([value]))
        time.sleep(0.05)


CALLERS = [nothing, half_open, random_bytes, a_web_browser, endless_zeros, drop_by_drop]


def visit(host, port, caller, found):
    began = time.monotonic()
    heard = b""
    with socket.create_connection((host, port), timeout=60) as conn:
        with contextlib.suppress(ConnectionError):  # it may be closed while it still talks
            caller(conn)
        with contextlib.suppress(ConnectionError):
            while part := conn.recv(4096):
                heard += part
    found.append((caller.__name__, time.monotonic() - began, heard))


@pytest.mark.parametrize("size", [2])
def test_strangers_at_the_port_are_dropped_and_change_nothing(cast, size):
    members = cast.all(member, size)
    ports = [each.expect("up") for each in members]
    found = []
    threads = [
        threading.Thread(target=visit, args=(port.host, port.port, caller, found), daemon=True)
        for port in ports
        for caller in CALLERS * 3
    ]
    for each in members:
        each.say("look")
    before = [each.expect("looked").count for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(found) == len(threads)
    for name, took, _ in found:
        assert took < SOON, (name, took)  # a second is the contract; by simulated time in test_watchdog_peers
    assert {heard for _, _, heard in found} == {b""}, "a stranger is told nothing"
    for each, count in zip(members, before, strict=True):
        deadline = time.monotonic() + SOON
        while True:
            each.say("look")
            looked = each.expect("looked")
            assert (looked.state, looked.breakage) == ("active", None)
            if looked.count > count:
                break
            assert time.monotonic() < deadline, "no traffic"
            time.sleep(0.05)
    for each in members:
        each.say("stop")
    for each in members:
        assert [seen["kinds"] for seen in each.expect("done").ended] == [[]]
    for each in members:
        each.say("close")
    assert [each.finish() for each in members] == [0] * size
