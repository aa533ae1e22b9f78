"""A world that is closed waits until its messages are received, and no longer: whatever their receivers do by then."""

from __future__ import annotations

import os
import time

import pytest
import torch
from kits.contract.waykit import RECEIVES, world
from kits.contract.worldkit import PATIENCE, SOON

import multiworld as mw

SIZES = [4, 5000, 70 << 10, 3 << 20]
WORLDS = 4


def pattern(number, nbytes):
    return torch.full((nbytes,), number % 251, dtype=torch.uint8)


def names():
    return [f"w{number}" for number in range(WORLDS)]


def join(me, name, size, lane):
    os.environ["M8D_LANE"] = lane
    return mw.join(name, me.rank, size, store=me.store, timeout=PATIENCE, hang_timeout=PATIENCE)


def closes(me, size, lane, idle, **_):
    """Sends, and closes one world after the other while the others call nothing in them."""
    worlds = [join(me, name, size, lane) for name in names()]
    other = join(me, "other", size, lane)
    for number, w in enumerate(worlds):
        for nbytes in SIZES:
            works = [w.isend(pattern(number, nbytes), dst) for dst in range(1, size)]
            for each in works:
                each.wait()
    me.hear()
    took = []
    for w in worlds:
        began = time.monotonic()
        assert w.close()
        took.append(time.monotonic() - began)
    me.emit("closed", took=took)
    me.hear()
    for dst in range(1, size):
        other.send(torch.ones(1), dst)
    other.close()


def idles(me, size, lane, idle, way):
    """Receives all, and calls nothing in the worlds after that."""
    worlds = [join(me, name, size, lane) for name in names()]
    other = join(me, "other", size, lane)
    for number, w in enumerate(worlds):
        for nbytes in SIZES:
            room = torch.zeros(nbytes, dtype=torch.uint8)
            RECEIVES[way](w, room, 0)
            assert (room == number % 251).all()
    child = 0
    if idle == "forked":
        ends = os.pipe()
        child = os.fork()
        if not child:
            os.close(ends[1])
            os.read(ends[0], 1)  # until the parent closes its end, or dies
            os._exit(0)
        os.close(ends[0])
    me.emit("idle")
    if idle == "in another world":
        other.recv(torch.zeros(1), 0)
    else:
        assert me.hear() == "go on"
        other.recv(torch.zeros(1), 0)
    for w in worlds:
        w.close()
    other.close()
    if child:
        os.close(ends[1])
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("way", "idle", "lane"),
    [
        ("recv_method", "nowhere", "1"),
        ("recv_awaited", "in another world", "1"),
        ("recv_block_work", "forked", "1"),
        ("recv_method", "nowhere", "p2p"),
    ],
)
def test_a_close_after_all_is_received_does_not_wait_for_idle_receivers(cast, way, idle, lane):
    arguments = {"size": 3, "lane": lane, "idle": idle}
    first, *others = [cast.start(idles if rank else closes, rank, way=way, **arguments) for rank in range(3)]
    for each in others:
        each.expect("idle")
    first.say("close")
    took = first.expect("closed").took
    first.say("go on")
    for each in others:
        each.say("go on")
    # Each would take 0.8 of its timeout, which is half of `PATIENCE` here; the machine may stall at one of them.
    assert sorted(took)[WORLDS // 2] < 1, took
    assert max(took) < SOON, took
    assert [each.finish() for each in (first, *others)] == [0, 0, 0]


def sends_and_closes(me, size):
    w = mw.join("w", me.rank, size, store=me.store, timeout=PATIENCE, hang_timeout=PATIENCE)
    w.barrier()
    for number, nbytes in enumerate(SIZES):
        w.isend(pattern(number, nbytes), 1)
    assert w.close()
    me.emit("closed")


def receives_late(me, size):
    with world(me, size) as w:
        w.barrier()
        peer = w._gen.lane.endpoint._core.peers[0]
        deadline = time.monotonic() + PATIENCE
        while not peer.holds:  # it was asked, and has read that rank 0 waits
            assert time.monotonic() < deadline
            time.sleep(0.01)
        me.emit("asked")
        for number, nbytes in enumerate(SIZES):
            assert me.hear() == "receive"
            room = torch.zeros(nbytes, dtype=torch.uint8)
            began = time.monotonic()
            w.recv(room, 0)
            assert (room == number % 251).all()
            me.emit("received", began=began)
        me.hear()


def test_a_message_without_a_receive_holds_the_close_until_it_is_received(cast):
    first, other = cast.start(sends_and_closes, 0, size=2), cast.start(receives_late, 1, size=2)
    other.expect("asked")
    for _ in SIZES:
        assert not first.conn.poll(0.1), "it closed before all was received"
        other.say("receive")
        received = other.expect("received")
    closed = first.expect("closed")
    assert closed.at >= received.began
    assert closed.at - received.at < SOON / 3
    other.say("close")
    assert [each.finish() for each in (first, other)] == [0, 0]
