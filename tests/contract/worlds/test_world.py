"""Worlds from the outside: joining, using, breaking, rejoining, closing; members are real processes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.programkit import tell_error
from kits.contract.worldkit import HANG, SOON, left_over, threads_ended

import multiworld as mw

# -- values ---------------------------------------------------------------------------------------------------------


def values(me, size):  # noqa: PLR0915  (one of each)
    w = mw.join("w1", me.rank, size, store=me.store, timeout=30)
    r = me.rank
    t = torch.full((4,), float(r + 1))
    w.all_reduce(t)
    assert t.tolist() == [sum(range(1, size + 1))] * 4
    t = torch.full((3,), float(r))
    w.broadcast(t, 1)
    assert t.tolist() == [1.0] * 3
    if r == 0:
        w.send(torch.arange(5), 1)
        w.send_object_list([{"a": 1}, "b", [2.0]], 1)
    if r == 1:
        t = torch.zeros(5, dtype=torch.int64)
        assert w.recv(t, 0) == 0
        assert t.tolist() == [0, 1, 2, 3, 4]
        got = [None] * 3
        assert w.recv_object_list(got, 0) == 0
        assert got == [{"a": 1}, "b", [2.0]]
    parts = [torch.zeros(2) for _ in range(size)]
    w.all_gather(parts, torch.full((2,), float(r)))
    assert [part[0].item() for part in parts] == list(range(size))
    flat = torch.zeros(size * 2)
    w.all_gather_into_tensor(flat, torch.full((2,), float(r)))
    assert flat.tolist() == [float(i) for i in range(size) for _ in range(2)]
    t = torch.ones(2)
    w.reduce(t, 0)
    if r == 0:
        assert t.tolist() == [float(size)] * 2
    got = [torch.zeros(1) for _ in range(size)] if r == 0 else None
    w.gather(torch.tensor([float(r)]), got, 0)
    if r == 0:
        assert [g.item() for g in got] == list(range(size))
    t = torch.zeros(1)
    w.scatter(t, [torch.tensor([float(i * 10)]) for i in range(size)] if r == 1 else None, 1)
    assert t.item() == r * 10
    out = [torch.zeros(1) for _ in range(size)]
    w.all_to_all_single(flat2 := torch.zeros(size), torch.arange(size).float() + 10 * r)
    assert flat2.tolist() == [10.0 * i + r for i in range(size)]
    work = w.all_reduce(t := torch.ones(1), async_op=True)
    work.wait()
    assert t.item() == size
    assert len(out) == size
    objects = [None] * size
    w.all_gather_object(objects, ("rank", r))
    assert objects == [("rank", i) for i in range(size)]
    objects = ["x", r] if r == 0 else [None, None]
    w.broadcast_object_list(objects, 0)
    assert objects == ["x", 0]
    got = [None] * size if r == 0 else None
    w.gather_object({"r": r}, got, 0)
    if r == 0:
        assert got == [{"r": i} for i in range(size)]
    got = [None]
    w.scatter_object_list(got, [f"to {i}" for i in range(size)] if r == 0 else None, 0)
    assert got == [f"to {r}"]
    with w:
        assert (dist.get_rank(), dist.get_world_size()) == (r, size)
        ops = [
            dist.P2POp(dist.isend, torch.tensor([r]), (r + 1) % size),
            dist.P2POp(dist.irecv, t := torch.zeros(1, dtype=torch.int64), (r - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert t.item() == (r - 1) % size
    me.emit("state", state=str(w.state), generation=w.generation, repr=repr(w))
    w.barrier()  # else the first to close would break the others' worlds before they looked
    assert list(mw.worlds()) == ["w1"]
    del work, ops  # a work that is held holds gloo's device
    assert w.close()
    assert w.close()
    assert mw.worlds() == {}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_method_gives_torchs_values(cast, size):
    members = cast.all(values, size)
    for member in members:
        seen = member.expect("state")
        assert (seen.state, seen.generation) == ("active", 1)
    assert [member.finish() for member in members] == [0] * size


def awaited(me, size):
    async def main():
        w = await mw.join_async("w1", me.rank, size, store=me.store, timeout=30)
        r = me.rank
        t = torch.full((4,), float(r + 1))
        await w.aio.all_reduce(t)
        assert t.tolist() == [sum(range(1, size + 1))] * 4
        if r == 0:
            await w.aio.send(torch.arange(5), 1)
            await w.aio.recv(torch.zeros(1), 1)  # it has cancelled its receive
            await w.aio.send(torch.arange(5) + 5, 1)
            await w.aio.send(torch.arange(5) + 10, 1)
        if r == 1:
            t = torch.zeros(5, dtype=torch.int64)
            assert await w.aio.recv(t, 0) == 0
            assert t.tolist() == [0, 1, 2, 3, 4]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(w.aio.recv(torch.zeros(5, dtype=torch.int64), 0), 0.05)
            await w.aio.send(torch.zeros(1), 0)
            await w.aio.recv(t, 0)  # the message the cancelled receive was posted for
            assert t.tolist() == [5, 6, 7, 8, 9]
            w.recv(t, 0)
            assert t.tolist() == [10, 11, 12, 13, 14]
        objects = [None] * size
        await w.aio.all_gather_object(objects, r)
        assert objects == list(range(size))
        await w.aio.barrier()
        t = torch.zeros(5)
        work = await (w.aio.isend(t, 1) if r == 0 else w.aio.irecv(t, 0)) if r < 2 else None
        if work is not None:
            await work
        await asyncio.gather(*(w.aio.all_reduce(torch.ones(2)) for _ in range(8)))
        await w.aio.barrier()
        w.close()

    asyncio.run(main())


@pytest.mark.parametrize("size", [2, 3])
def test_every_method_can_be_awaited(cast, size):
    members = cast.all(awaited, size)
    assert [member.finish() for member in members] == [0] * size


# -- faults ---------------------------------------------------------------------------------------------------------

BLOCKED = {
    "send": lambda w, victim: w.send(torch.ones(1 << 22), victim),
    "recv": lambda w, victim: w.recv(torch.ones(1), victim),
    "irecv": lambda w, victim: w.irecv(torch.ones(1), victim).wait(),
    "all_reduce": lambda w, victim: w.all_reduce(torch.ones(1)),
    "broadcast": lambda w, victim: w.broadcast(torch.ones(1), victim),
    "reduce": lambda w, victim: w.reduce(torch.ones(1), w.rank),
    "all_gather": lambda w, victim: w.all_gather([torch.ones(1) for _ in range(w.world_size)], torch.ones(1)),
    "gather": lambda w, victim: w.gather(torch.ones(1), [torch.ones(1) for _ in range(w.world_size)], w.rank),
    "scatter": lambda w, victim: w.scatter(torch.ones(1), None, victim),
    "reduce_scatter": lambda w, victim: w.reduce_scatter(torch.ones(1), [torch.ones(1)] * w.world_size),
    "all_to_all": lambda w, victim: w.all_to_all_single(torch.ones(w.world_size), torch.ones(w.world_size)),
    "barrier": lambda w, victim: w.barrier(),
    "all_gather_object": lambda w, victim: w.all_gather_object([None] * w.world_size, 1),
}


def blocked(me, size, op, face, hang=30.0):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60, hang_timeout=hang)
    w.barrier()
    me.emit("ready")
    victim = size - 1
    if me.rank == victim:
        time.sleep(60)
    idle = me.rank == 1 and size > 2  # a survivor that talks to nobody
    if idle:
        told = threading.Event()
        w.on_break(lambda world: told.set())
        assert told.wait(60)
        me.emit("raised", cause=str(w.breakage.cause), ranks=w.breakage.ranks, kind="told", generation=1)
    elif face == "sync":
        tell_error(me, lambda: BLOCKED[op](w, victim))
    elif face == "torch":
        with w:
            tell_error(
                me, lambda: getattr(dist, op)(torch.ones(1), *(() if op == "all_reduce" else (victim,)))
            )
    else:
        call = {
            "recv": lambda: w.aio.recv(torch.ones(1), victim),
            "all_reduce": lambda: w.aio.all_reduce(torch.ones(1)),
        }
        tell_error(me, lambda: asyncio.run(_await(call[op])))
    tell_error(me, lambda: w.all_reduce(torch.ones(1)))
    me.hear()
    assert w.close()


async def _await(call):
    await call()


@pytest.mark.parametrize(
    ("op", "face", "size"),
    [*((op, "sync", 2) for op in BLOCKED), *((op, "sync", 4) for op in ("recv", "all_reduce", "barrier")),
     ("recv", "aio", 2), ("all_reduce", "aio", 3), ("recv", "torch", 2), ("all_reduce", "torch", 5)],
)  # fmt: skip
def test_a_crash_raises_in_everyone_at_once(cast, op, face, size):
    members = cast.all(blocked, size, op=op, face=face)
    for member in members:
        member.expect("ready")
    time.sleep(0.2)  # let them get into the operation; what is measured starts after
    killed = members[-1].kill()
    took = []
    for member in members[:-1]:
        seen = member.expect("raised")
        if seen.kind == "RuntimeError" and "does not support" in seen.text:
            pytest.skip(f"this torch cannot do it: {seen.text}")  # gloo before 2.7
        assert (seen.cause, tuple(seen.ranks), seen.generation) == ("crashed", (size - 1,), 1), seen
        took.append(seen.at - killed)
        later = member.expect("raised")
        assert (later.kind, later.cause, tuple(later.ranks)) == (
            "BrokenWorldException",
            "crashed",
            (size - 1,),
        )
        member.say("done")
    # Milliseconds, measured (test_faults_crash). The bound tells that nobody waits for a timeout.
    assert max(took) < SOON
    assert [member.finish() for member in members[:-1]] == [0] * (size - 1)


@pytest.mark.parametrize(("op", "face"), [("recv", "sync"), ("all_reduce", "sync"), ("recv", "aio")])
def test_a_stopped_member_is_hung(cast, op, face):
    members = cast.all(blocked, 3, op=op, face=face, hang=HANG)
    for member in members:
        member.expect("ready")
    stopped = members[-1].stop()
    for member in members[:-1]:
        seen = member.expect("raised")
        assert (seen.cause, tuple(seen.ranks)) == ("hung", (2,)), seen
        # Counted from the last sign of life, which a stalled machine may have kept from being sent.
        assert 0.25 * HANG < seen.at - stopped < HANG + SOON
        member.expect("raised")
        member.say("done")
    assert [member.finish() for member in members[:-1]] == [0] * 2


def leaver(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=30)
    w.barrier()
    if me.rank == 0:
        w.send(torch.arange(1 << 20), 1)
        w.close()
        return
    t = torch.zeros(1 << 20, dtype=torch.int64)
    w.recv(t, 0)
    assert t[-1].item() == (1 << 20) - 1
    tell_error(me, lambda: w.recv(t, 0))
    w.close()


def test_leaving_is_told_and_loses_nothing(cast):
    members = cast.all(leaver, 2)
    seen = members[1].expect("raised")
    assert (seen.cause, tuple(seen.ranks)) == ("left", (0,))
    assert [member.finish() for member in members] == [0, 0]


# -- generations ----------------------------------------------------------------------------------------------------


def survivor(me, size, rounds):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=40)
    for expected in range(1, rounds + 1):
        assert w.generation == expected
        t = torch.full((2,), float(w.generation))
        w.all_reduce(t)
        assert t.tolist() == [expected * size] * 2
        me.emit("active", generation=w.generation)
        tell_error(me, lambda: w.recv(torch.zeros(1), size - 1))
        if expected < rounds:
            assert w.rejoin() is w
    w.close()
    assert threads_ended() == [] or me.emit("left", **left_over())


def victim(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=40)
    w.all_reduce(torch.full((2,), float(w.generation)))
    me.emit("active", generation=w.generation)
    time.sleep(60)


def test_a_broken_world_is_joined_again_under_its_name(cast):
    size, rounds = 3, 4
    members = [cast.start(survivor, rank, size=size, rounds=rounds) for rank in range(size - 1)]
    for generation in range(1, rounds + 1):
        last = cast.start(victim, size - 1, size=size)
        for member in (*members, last):
            assert member.expect("active").generation == generation
        last.kill()
        for member in members:
            seen = member.expect("raised")
            assert (seen.cause, seen.generation) == ("crashed", generation)
    assert [member.finish() for member in members] == [0, 0]
