"""What the pages claim of worlds and no other test shows: the store's end, timeouts, who is selected where."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.worldkit import HANG, SOON, free_port

import multiworld as mw

pytestmark = pytest.mark.everyday


def broken(fn):
    with pytest.raises(mw.BrokenWorldException) as caught:
        fn()
    return caught.value


# -- docs/faults.md: rank 0 ends, and with it the store it served ----------------------------------------------------


def server(me, address):
    mw.join("first", 0, 2, store=address, timeout=60).barrier()
    me.emit("up")
    time.sleep(60)


def middle(me, address):
    first = mw.join("first", 1, 2, store=address, timeout=60)
    second = mw.join("second", 0, 2, store=address, timeout=60)
    first.barrier()
    me.emit("up")
    error = broken(lambda: first.recv(torch.zeros(1), 0))
    second.send(torch.ones(1), 1)  # active worlds do not need the store
    me.hear()
    mw.join("third", 0, 2, store=address, timeout=60).barrier()  # rank 0 of the next join serves it again
    me.emit("done", cause=error.cause, ranks=error.ranks, state=str(second.state))
    me.hear()


def outer(me, address):
    second = mw.join("second", 1, 2, store=address, timeout=60)
    me.emit("up")
    t = torch.zeros(1)
    second.recv(t, 0)
    mw.join("third", 1, 2, store=address, timeout=60).barrier()
    me.emit("done", got=t.item(), state=str(second.state))
    me.hear()


def test_other_worlds_outlive_the_store(cast):
    address = f"tcp://127.0.0.1:{free_port()}"
    members = [cast.start(program, address=address) for program in (server, middle, outer)]
    for member in members:
        member.expect("up")
    members[0].kill()
    members[0].finish()  # the address is free when the process is gone, not when the others notice
    members[1].say("go on")
    seen = members[1].expect("done")
    assert (seen.cause, tuple(seen.ranks), seen.state) == ("crashed", (0,), "active")
    seen = members[2].expect("done")
    assert (seen.got, seen.state) == (1.0, "active")
    for member in members[1:]:
        member.say("end")
        assert member.finish() == 0


# -- docs/faults.md: an operation that takes longer than `timeout`, all members alive ---------------------------------


def waits(me):
    world = mw.join("w1", me.rank, 2, store=me.store, timeout=5)
    world.barrier()
    if me.rank == 0:
        started = time.monotonic()
        error = broken(lambda: world.recv(torch.zeros(1), 1))
        me.emit("raised", cause=error.cause, took=time.monotonic() - started)
        me.hear()
        return
    told = threading.Event()
    world.on_break(lambda _: told.set())
    assert told.wait(60)
    me.emit("raised", cause=str(world.breakage.cause))
    me.hear()


def test_an_operations_own_timeout_breaks_the_world(cast):
    members = [cast.start(waits, rank) for rank in range(2)]
    seen = members[0].expect("raised")
    assert seen.cause == "failed"
    assert 4.5 < seen.took < 5 + SOON
    assert members[1].expect("raised").cause == "failed"
    for member in members:
        member.say("end")
        assert member.finish() == 0


# -- docs/faults.md: a member that was declared hung goes on ---------------------------------------------------------


def sleeper(me):
    world = mw.join("w1", me.rank, 2, store=me.store, timeout=60, hang_timeout=HANG)
    world.barrier()
    me.emit("up")
    error = broken(lambda: world.recv(torch.zeros(1), 1 - me.rank))
    me.emit("raised", cause=error.cause, ranks=error.ranks)
    world.rejoin()
    t = torch.ones(1)
    world.all_reduce(t)
    me.emit("again", generation=world.generation, got=t.item())
    me.hear()


def test_a_member_that_was_hung_learns_it_and_may_come_back(cast):
    members = [cast.start(sleeper, rank) for rank in range(2)]
    for member in members:
        member.expect("up")
    members[1].stop()
    first = members[0].expect("raised")
    members[1].go_on()
    for seen in (first, members[1].expect("raised")):
        assert (seen.cause, tuple(seen.ranks)) == ("hung", (1,))
    for member in members:
        seen = member.expect("again")
        assert seen.got == 2.0
        assert seen.generation > 1
        member.say("end")
        assert member.finish() == 0


# -- docs/concepts.md: who is selected where -------------------------------------------------------------------------


def selected(me):
    one = mw.join("one", me.rank, 2, store=me.store, timeout=30)
    two = mw.join("two", 1 - me.rank, 2, store=me.store, timeout=30)

    def here():
        return dist.get_rank() if dist.is_initialized() else None

    def in_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(here()))
        thread.start()
        thread.join(60)
        return found[0]

    async def tasks():
        async def nested():
            before = here()
            with two:
                inside = here()
                await asyncio.sleep(0)
                return before, inside, here()

        with one:
            made = asyncio.create_task(nested())
            await asyncio.sleep(0)
            return here(), await asyncio.to_thread(here), await made

    assert here() is None
    with one:
        assert (here(), in_thread()) == (me.rank, None)
        with two:
            assert here() == 1 - me.rank
        assert here() == me.rank
    assert here() is None
    assert asyncio.run(tasks()) == (me.rank, me.rank, (me.rank, 1 - me.rank, 1 - me.rank))
    one.barrier()
    with one:
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo", init_method=me.store, rank=me.rank, world_size=2)
        mesh_one = dist.init_device_mesh("cpu", (2,))
        two.barrier()  # the first to leave ends it for the other, who may not have its mesh yet
        dist.destroy_process_group()
    with two:
        assert dist.init_device_mesh("cpu", (2,)) != mesh_one
    deadline = time.monotonic() + 60
    while one.state is not mw.State.CLOSED and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one.state is mw.State.CLOSED
    assert two.state is mw.State.ACTIVE
    two.barrier()


def test_who_is_selected_where(cast):
    members = [cast.start(selected, rank) for rank in range(2)]
    assert [member.finish() for member in members] == [0, 0], [member.heard for member in members]
