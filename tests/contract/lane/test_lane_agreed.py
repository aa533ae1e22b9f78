"""Which worlds have a lane: all members agree at the join, and a world without one works as well."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from kits.contract.waykit import RECEIVES, SENDS, forbid_memory, readers, without_lane, world

import multiworld as mw

TAKEN = [f"recv_{each}" for each in SENDS]


def everything(w):
    """Send around the ring in all ways, from any source too, and reduce."""
    after, before = (w.rank + 1) % w.world_size, (w.rank - 1) % w.world_size
    for send, receive in zip(SENDS.values(), TAKEN, strict=True):
        got = torch.zeros(3)
        if w.rank % 2:
            RECEIVES[receive](w, got, before)
            send(w, torch.full((3,), float(w.rank)), after)
        else:
            work = w.isend(torch.full((3,), float(w.rank)), after)  # the ring may be odd
            RECEIVES[receive](w, got, before)
            work.wait()
        assert got.tolist() == [before] * 3, (send, got)
    if w.rank == 0:
        sources = {w.recv(torch.zeros(1), tag=4) for _ in range(w.world_size - 1)}
        assert sources == {*range(1, w.world_size)}
    else:
        w.send(torch.zeros(1), 0, tag=4)
    total = torch.ones(2)
    w.all_reduce(total)
    assert total.tolist() == [w.world_size] * 2


def member(me, size, without):
    if me.rank in without:
        without_lane()
    with world(me, size) as w:
        me.emit("lane", lane=w._gen.lane is not None)
        everything(w)
        with w:
            dist.barrier()


@pytest.mark.parametrize("without", [(), (0,), (2,)], ids=str)
def test_one_member_without_a_lane_takes_it_from_all(cast, without):
    members = cast.all(member, 3, without=without)
    assert [each.expect("lane").lane for each in members] == [not without] * 3
    assert [each.finish() for each in members] == [0, 0, 0]


def side_by_side(me, size, monkeyed):
    """Worlds with lanes and without, in one process, each at the other's side."""
    import os

    with world(me, size, name="a") as a:
        os.environ["M8D_LANE"] = monkeyed[me.rank]
        with world(me, size, name="b") as b:
            os.environ["M8D_LANE"] = "1"
            with world(me, size, name="c") as c:
                me.emit("lanes", lanes=[each._gen.lane is not None for each in (a, b, c)])
                other, got = 1 - me.rank, [torch.zeros(1) for _ in range(3)]
                works = [each.irecv(room, other) for each, room in zip((a, b, c), got, strict=True)]
                for number, each in reversed([*enumerate((a, b, c))]):
                    each.send(torch.full((1,), float(number)), other)
                for each in works:
                    each.wait()
                assert torch.cat(got).tolist() == [0, 1, 2]
                for each in (a, b, c):
                    everything(each)
            everything(b)
        everything(a)
        # Agreed anew at each join.
        a.barrier()


@pytest.mark.parametrize("without", [("0", "0"), ("1", "0")], ids=str)
def test_worlds_with_and_without_lanes_go_side_by_side(cast, without):
    members = cast.all(side_by_side, 2, monkeyed=without)
    assert [each.expect("lanes").lanes for each in members] == [[True, False, True]] * 2
    assert [each.finish() for each in members] == [0, 0]


def again(me, size):
    """A generation later the members agree anew."""
    import os

    lanes = []
    for lane in "101":
        os.environ["M8D_LANE"] = lane if me.rank else "1"
        with world(me, size) as w:
            lanes.append(w._gen.lane is not None)
            everything(w)
            w.barrier()
    me.emit("lanes", lanes=lanes)


def test_each_generation_agrees_anew(cast):
    members = cast.all(again, 2)
    assert [each.expect("lanes").lanes for each in members] == [[True, False, True]] * 2
    assert [each.finish() for each in members] == [0, 0]


def alone(me, size):
    with world(me, size) as w:
        me.emit("lane", lane=w._gen.lane is not None)
        w.barrier()
        with pytest.raises(ValueError, match="is alone in"):
            w.recv(torch.zeros(1))
        with pytest.raises(ValueError, match="not a peer"):
            w.send(torch.zeros(1), 0)


def test_a_world_of_one_has_none(cast):
    (only,) = cast.all(alone, 1)
    assert only.expect("lane").lane is False
    assert only.finish() == 0


def fake(me, size):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    w = mw.join("w", me.rank, size, store=me.store, backend="fake", timeout=60)
    me.emit("lane", lane=w._gen.lane is not None)
    w.send(torch.ones(2), 1 - me.rank)  # which sends nothing
    me.emit("sent")
    me.hear()  # this backend has no barrier that waits
    w.close()


def test_a_backend_that_sends_nothing_has_none(cast):
    members = cast.all(fake, 2)
    assert [each.expect("lane").lane for each in members] == [False, False]
    for each in members:
        each.expect("sent")
    for each in members:
        each.say("close")
    assert [each.finish() for each in members] == [0, 0]


def unreadable(me, size, which):
    """Memory that one member cannot read: its messages travel, all others as they can."""
    if me.rank in which:
        forbid_memory()
    with world(me, size) as w:
        me.emit("readers", readers=readers(w))
        large = torch.arange(3 << 18)
        if me.rank == 0:
            for dst in (1, 2):
                w.send(large, dst)
            for src in (1, 2):
                assert torch.equal(large, _received(w, src, large))
        else:
            assert torch.equal(large, _received(w, 0, large))
            w.send(large, 0)
        everything(w)


def _received(w, src, like):
    room = torch.zeros_like(like)
    w.recv(room, src)
    return room


def test_memory_that_one_cannot_read(cast):
    members = cast.all(unreadable, 3, which=(1,))
    seen = [each.expect("readers").readers for each in members]
    assert seen[1] == []
    assert [each.finish() for each in members] == [0, 0, 0]
