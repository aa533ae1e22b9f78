"""gloo's group is made when a member needs it, by all members, whatever their programs do; and never before."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from kits.contract.waykit import world
from kits.contract.worldkit import HANG, PATIENCE, SOON, outcome

import multiworld as mw
from multiworld._c10d.lane.exchange import Exchange
from multiworld._net.lane.endpoint import Endpoint

TRUTH = dist.ReduceOp.MAX


def by_gloo(w):
    """A collective that the lane does not take: of booleans."""
    truth = torch.tensor([w.rank == 0])
    w.all_reduce(truth, TRUTH)
    assert truth.item() is True


def is_made(w):
    return w._gen.group.pg is not None


def without(me, size):
    with world(me, size) as w:
        total = torch.ones(2)
        w.all_reduce(total)
        w.barrier()
        w.send(total, (me.rank + 1) % size)
        w.recv(torch.zeros(2))
        with w:
            said = (dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend())
            with pytest.raises(ValueError, match="twice"):
                dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        assert said == (True, me.rank, size, "gloo")
        assert not is_made(w)
        me.emit("none", groups=len(w._gen.c10d.gloo.groups()))
        w.barrier()  # none has left before all have looked


def test_messages_collectives_and_questions_need_no_group(cast):
    members = cast.all(without, 3)
    assert [each.expect("none").groups for each in members] == [0] * 3
    assert [each.finish() for each in members] == [0] * 3


def asked(me, size, way):
    """Rank 0 needs the group; the others sleep, wait in a receive, or run a loop that does something else."""
    with world(me, size) as w:
        w.barrier()
        if me.rank == 0:
            with w:
                group = dist.group.WORLD
            assert is_made(w)
            assert w.group is group
            for rank in range(1, size):
                w.send(torch.ones(1), rank)
        elif way == "asleep":
            deadline = time.monotonic() + SOON
            while not is_made(w) and time.monotonic() < deadline:
                time.sleep(0.005)
            assert is_made(w)
            w.recv(torch.zeros(1), 0)
        elif way == "receiving":
            w.recv(torch.zeros(1), 0)
        else:
            asyncio.run(w.aio.recv(torch.zeros(1), 0))
        by_gloo(w)
        with w:
            total = torch.ones(1)
            dist.all_reduce(total)
            part = dist.new_group([0, 1])
            if me.rank < 2:
                truth = torch.tensor([me.rank == 1])
                dist.all_reduce(truth, TRUTH, group=part)
                assert truth.item() is True
            dist.destroy_process_group(part)
        assert total.item() == size
        w.barrier()
        # None of the exchange's: with one the lane has no short way.
        assert w._gen.lane.endpoint._core._state.matching._receives == {}
        w.barrier()  # none has left before all have looked


@pytest.mark.parametrize("way", ["asleep", "receiving", "awaiting"])
def test_one_that_needs_it_gets_it_whatever_the_others_do(cast, way):
    members = cast.all(asked, 3, way=way)
    assert [each.finish() for each in members] == [0] * 3


def by_ranks(me, size):
    """Functional collectives find the group by its ranks, and ask for no default group."""
    import torch.distributed._functional_collectives as funcol

    with world(me, size) as w:
        with w:
            total = funcol.all_reduce(torch.ones(2), "sum", [*range(size)])
            assert (total + 0).tolist() == [size] * 2
        assert is_made(w)
        w.barrier()


def test_a_group_that_is_found_by_its_ranks_is_made(cast):
    members = cast.all(by_ranks, 2)
    assert [each.finish() for each in members] == [0] * 2


def at_once(me, size):
    """All need it at the same time, by many tasks each; they are carried out in the order of the calls."""
    with world(me, size) as w:

        async def main():
            sums = [torch.tensor([True]) for _ in range(20)]
            cut = asyncio.create_task(w.aio.all_reduce(sums[0], TRUTH))
            rest = [asyncio.create_task(w.aio.all_reduce(each, TRUTH)) for each in sums[1:]]
            await asyncio.sleep(0)
            cut.cancel()  # it is posted all the same
            await asyncio.gather(*rest)

        asyncio.run(main())
        by_gloo(w)


def test_tasks_that_need_it_have_their_turns(cast):
    members = cast.all(at_once, 2)
    assert [each.finish() for each in members] == [0] * 2


def bereft(me, size, way):
    """Rank 0 needs the group, and another member is killed or stopped before it can take part."""
    w = mw.join("w", me.rank, size, store=me.store, timeout=4 * PATIENCE, hang_timeout=HANG)
    w.barrier()
    me.emit("joined")
    if me.rank:
        me.hear(4 * PATIENCE)
        return
    me.hear()
    turns = 0

    async def awaited():
        nonlocal turns
        call = asyncio.create_task(w.aio.all_reduce(torch.tensor([True]), TRUTH))
        while not call.done():
            turns += 1
            await asyncio.sleep(0.01)
        await call

    told = outcome((lambda: by_gloo(w)) if way == "blocking" else (lambda: asyncio.run(awaited())))
    me.emit("ended", late=time.monotonic() - w.breakage.at, turns=turns, **told)
    with w:
        assert (dist.get_rank(), dist.get_world_size()) == (0, size)
        with pytest.raises(mw.BrokenWorldException):
            dist.barrier()
        with pytest.raises(mw.BrokenWorldException):
            dist.distributed_c10d._find_pg_by_ranks_and_tag("", [*range(size)])
    assert w.close()


@pytest.mark.parametrize("fault", ["crashed", "hung"])
@pytest.mark.parametrize("way", ["blocking", "awaited"])
def test_who_waits_for_it_hears_of_a_lost_member(cast, fault, way):
    members = cast.all(bereft, 3, way=way)
    for each in members:
        each.expect("joined")
    members[2].kill() if fault == "crashed" else members[2].stop()
    members[0].say("go")
    ended = members[0].expect("ended")
    assert (ended.cause, ended.ranks) == (fault, (2,))
    assert ended.late < 1.0, ended
    assert ended.turns > (10 if (fault, way) == ("hung", "awaited") else -1)  # the loop went on
    assert members[0].finish() == 0


def unable(me, size):
    """A member cannot make its part: the world breaks on all, and can be joined again."""
    from multiworld._c10d.gloo import backend

    w = mw.join("w", me.rank, size, store=me.store, timeout=PATIENCE)
    plain = backend._make
    if me.rank == 1:
        backend._make = lambda _: (_ for _ in ()).throw(RuntimeError("no device is to be had"))
    w.barrier()
    if me.rank == 1:
        me.emit("broken", **outcome(lambda: w.recv(torch.zeros(1), 0)))
    else:
        me.emit("broken", **outcome(lambda: by_gloo(w)))
    backend._make = plain
    w.rejoin()
    by_gloo(w)
    w.barrier()
    assert w.close()


def test_one_that_cannot_make_it_breaks_the_world_on_all(cast):
    members = cast.all(unable, 2)
    broken = [each.expect("broken") for each in members]
    assert [each.kinds[0] for each in broken] == ["BrokenWorldException"] * 2
    assert "the gloo group could not be made" in broken[1].text
    assert "no device is to be had" in broken[1].text
    assert [each.finish() for each in members] == [0] * 2


def without_a_store(me, size):
    w = mw.join("w", me.rank, size, store=me.store, timeout=PATIENCE)
    w.barrier()
    me.emit("joined")
    me.hear()
    by_gloo(w)
    me.emit("reduced")
    w.barrier()
    w.close()


def test_it_needs_no_store(cast):
    members = cast.all(without_a_store, 2)
    for each in members:
        each.expect("joined")
    cast.server = None  # which ends it
    for each in members:
        each.say("the store is gone")
    for each in members:
        each.expect("reduced")
    assert [each.finish() for each in members] == [0] * 2


def ended_before(me, size, how):
    w = mw.join("w", me.rank, size, store=me.store, timeout=PATIENCE)
    w.barrier()
    if how == "destroyed":
        with w:
            dist.destroy_process_group()
            assert not dist.is_initialized()
        assert w.state is mw.State.CLOSED
    assert w.close()


@pytest.mark.parametrize("how", ["closed", "destroyed"])
def test_a_world_may_end_without_it(cast, how):
    members = cast.all(ended_before, 2, how=how)
    assert [each.finish() for each in members] == [0] * 2


def agreed(me, size, detailed):
    if me.rank in detailed:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
    with world(me, size) as w:
        me.emit("made", made=is_made(w))
        by_gloo(w)
        w.barrier()


@pytest.mark.parametrize("detailed", [(), (0, 1)], ids=str)
def test_all_members_make_it_late_or_none_does(cast, detailed):
    members = cast.all(agreed, 2, detailed=detailed)
    assert [each.expect("made").made for each in members] == [bool(detailed)] * 2
    assert [each.finish() for each in members] == [0] * 2


def test_an_exchange_lets_go_of_what_its_caller_used():
    """The frames of a group's construction hold gloo's device, and that its sockets."""

    class Used:
        pass

    def use():
        used.append(weakref.ref(mine := Used()))
        exchange.check(["address"])
        assert mine

    used = []
    ends = [Endpoint({1 - rank: end}) for rank, end in enumerate(socket.socketpair())]
    exchange = Exchange(ends[0], [1], lambda ranks: None, lambda: None, asking=False)
    for each in ends:
        each.fail(ConnectionError("the world is over"))
    gc.disable()  # what only the collector frees counts as held
    try:
        with contextlib.suppress(ConnectionError):
            use()
        assert used[0]() is None
    finally:
        gc.enable()
