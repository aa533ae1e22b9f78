"""Collectives of CPU tensors over the lane: values, forms, dtypes, sizes, groups; and which of them it carries."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from kits.contract.collectiveforms import GLOO_OPS, OPS, WAYS, call
from kits.contract.waykit import world
from kits.contract.worldkit import PATIENCE
from torch.distributed.distributed_c10d import _coalescing_manager as from_before

from multiworld._c10d.lane import collectives
from multiworld._c10d.lane.collective_dispatch import LIMITS, Limits
from multiworld._c10d.lane.collective_work import CollectiveWork
from multiworld._core.lane import schedules
from multiworld._core.lane.greeting import CROWDS
from multiworld._join import lane as joining_lane

KB, MB = 1 << 10, 1 << 20
COUNTS = (0, 1, 1000, 20_000, 700_000)  # of float32: below and above what is cut into parts, and into pieces


def on_lane(w):
    """How many collectives of the default group have gone over the lane."""
    return w._gen.collectives.default._tags.__reduce__()[1][0]


def everything(me, size, memory):
    torch.set_num_threads(1)
    wrong, other = [], []
    with world(me, size, memory=memory) as w:
        for count, (number, op) in itertools.product(COUNTS, enumerate(OPS)):
            for root, way in enumerate(WAYS):
                # The largest in one form each, another one for each size: most of the time is theirs.
                if count == COUNTS[-1] and root != (number + size + memory) % len(WAYS):
                    continue
                before = on_lane(w)
                args, right = call(op, me.rank, size, count, torch.float32, root % size)
                WAYS[way](w, op, args)
                if not right():
                    wrong.append((op, way, count))
                if on_lane(w) != before + 1:
                    other.append((op, way, count))
        w.barrier()  # who is done first closes the world, and the others still count
        me.emit("wrong", wrong=wrong, other=other)


@pytest.mark.parametrize(("size", "memory"), [(2, True), (3, True), (4, True), (3, False)])
def test_all_collectives_in_all_forms_go_over_the_lane(cast, size, memory):
    members = cast.all(everything, size, memory=memory)
    for member in members:
        seen = member.expect("wrong", 4 * PATIENCE)
        assert (seen.wrong, seen.other) == ([], [])
    assert [each.finish() for each in members] == [0] * size


def in_a_crowd(me, size, older=False):
    """As many members as there are count as more than those whose large tensors go over the lane.

    `older`: rank 0's lane is of a version in which no collective of so many goes over it.
    """
    torch.set_num_threads(1)
    collectives.LIMITS, schedules.STAR = Limits(members=2), 2
    if older and me.rank == 0:
        joining_lane.VERSION = CROWDS - 1
    wrong, other = [], []
    with world(me, size) as w:
        for count, op, way in itertools.product((0, 1, 1000, 16_384, 16_385), OPS, WAYS):
            before = on_lane(w)
            args, right = call(op, me.rank, size, count, torch.float32, count % size)
            try:
                WAYS[way](w, op, args)
            except RuntimeError as error:
                if "does not support" not in str(error):  # gloo of torch 2.4 and 2.6 lacks two of them
                    raise
                continue
            if not right():
                wrong.append((op, way, count))
            largest = count * 4 * (size if op.endswith("_tensor") else 1)
            small = op == "barrier" or (largest <= LIMITS.whole and "all_to_all" not in op)
            if on_lane(w) != before + (small and not older):
                other.append((op, way, count))
        w.barrier()
        me.emit("wrong", wrong=wrong, other=other)


@pytest.mark.parametrize("size", [3, 6])
def test_small_collectives_of_many_members_go_over_the_lane(cast, size):
    for member in cast.all(in_a_crowd, size):
        seen = member.expect("wrong", 4 * PATIENCE)
        assert (seen.wrong, seen.other) == ([], [])


def test_they_do_not_where_a_member_does_not_know_it(cast):
    for member in cast.all(in_a_crowd, 3, older=True):
        seen = member.expect("wrong", 4 * PATIENCE)
        assert (seen.wrong, seen.other) == ([], [])


REDUCED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
MOVED = (*REDUCED, torch.bool, torch.int16, torch.complex64, torch.float8_e5m2)


def dtypes(me, size):
    wrong = []
    with world(me, size) as w:
        for dtype in REDUCED:
            for op in ("all_reduce", "reduce", "reduce_scatter_tensor"):
                args, right = call(op, me.rank, size, 33, dtype, 1)
                w_call(w, op, args)
                wrong += [] if right() else [(op, dtype)]
            integral = not dtype.is_floating_point
            for name in ("PRODUCT", "MIN", "MAX", *(("BAND", "BOR", "BXOR") if integral else ())):
                found = torch.tensor([1, 2, 3]).to(dtype) + me.rank
                given = [torch.tensor([1, 2, 3]).to(dtype) + rank for rank in range(size)]
                before = on_lane(w)
                w.all_reduce(found, getattr(dist.ReduceOp, name))
                wanted = given[0]
                for each in given[1:]:
                    wanted = FUNCTIONS[name](wanted, each)
                if not torch.equal(found, wanted) or on_lane(w) != before + 1:
                    wrong.append((name, dtype))
        for dtype in MOVED:
            bits = (torch.arange(dtype.itemsize * 5) % 2 + me.rank * 2 * (dtype != torch.bool)).to(
                torch.uint8
            )
            tensor = bits.view(dtype)
            before = on_lane(w)
            w.broadcast(tensor, 1)
            room = [torch.zeros(dtype.itemsize * 5, dtype=torch.uint8).view(dtype) for _ in range(size)]
            w.all_gather(room, tensor)
            if len({bytes(each.view(torch.uint8).tolist()) for each in (tensor, *room)}) != 1:
                wrong.append(("broadcast", dtype))
            if on_lane(w) != before + 2:
                wrong.append(("not over the lane", dtype))
        me.emit("wrong", wrong=[str(each) for each in wrong])


FUNCTIONS = {
    "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def w_call(w, op, args):
    WAYS["method"](w, op, args)


def test_dtypes_and_operations_are_those_of_gloo_and_more(cast):
    members = cast.all(dtypes, 3)
    assert [each.expect("wrong").wrong for each in members] == [[]] * 3
    assert [each.finish() for each in members] == [0] * 3


def bits(me, size):
    """Sums of numbers of all magnitudes depend on their order."""
    draw = torch.Generator().manual_seed(me.rank)
    found = []
    with world(me, size) as w:
        for count in (5, 16_000, 300_000):
            for way in WAYS.values():
                tensor = torch.randn(count, generator=draw) * 10.0 ** torch.randint(
                    -9, 9, (count,), generator=draw
                )
                way(w, "all_reduce", (tensor,))
                found.append(hash(bytes(tensor.view(torch.uint8).numpy())))
        me.emit("found", found=found)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_have_the_same_bits_on_all_members(cast, size, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    members = cast.all(bits, size)
    first, *others = [each.expect("found").found for each in members]
    assert others == [first] * (size - 1)
    assert [each.finish() for each in members] == [0] * size


# -- groups, works, order ---------------------------------------------------------------------------------------------


def groups(me, size):
    """Collectives of several groups at once, beside messages of any rank, which take none of theirs."""
    with world(me, size) as w, w:
        odd, everyone = dist.new_group([1, 3]), dist.new_group([3, 2, 1, 0])
        any_room = torch.zeros(1)
        any_work = w.irecv(any_room) if me.rank == 3 else None
        works, rooms = [], []
        for number in range(5):
            for group in (None, everyone, *((odd,) if me.rank % 2 else ())):
                room = torch.full((10,), float(me.rank + number))
                rooms.append((room, number, 4 if group is odd else 6, 2 if group is odd else 4))
                works.append(dist.all_reduce(room, group=group, async_op=True))
        assert all(type(work) is CollectiveWork for work in works)
        for work in works[::-1]:
            work.wait()
        for room, number, ranks, count in rooms:
            assert room.tolist() == [ranks + count * number] * 10
        got = torch.full((2,), float(me.rank))
        if me.rank % 2:
            dist.broadcast(got, 3, group=odd)  # ranks are the world's
            assert got.tolist() == [3, 3]
        if me.rank == 0:
            w.send(torch.tensor([9.0]), 3)
        if any_work is not None:
            any_work.wait()
            assert any_room.item() == 9
        w.barrier()


def test_groups_have_collectives_of_their_own(cast):
    assert [each.finish() for each in cast.all(groups, 4)] == [0] * 4


def works(me, size):
    with world(me, size) as w, w:
        tensor = torch.ones(4)
        work = dist.all_reduce(tensor, async_op=True)
        value = work.get_future().then(lambda future: future.value()[0] + 1).wait()
        assert value.tolist() == [size + 1] * 4
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is tensor
        work.wait()  # again
        assert tensor.tolist() == [size] * 4
        # One that no caller waits for gets on all the same: rank 0 only asks whether it is over.
        tensor.fill_(1)
        work = dist.all_reduce(tensor, async_op=True)
        if me.rank == 0:
            over = threading.Event()
            work.get_future().add_done_callback(lambda _: over.set())
            assert over.wait(PATIENCE)
        else:
            while not work.is_completed():
                threading.Event().wait(0.001)
        assert tensor.tolist() == [size] * 4
        # Two threads wait for one.
        work = dist.all_reduce(tensor, async_op=True)
        threads = [threading.Thread(target=work.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert tensor.tolist() == [size * size] * 4
        w.barrier()
        del work, value
        gc.collect()


def test_a_work_can_be_waited_for_in_every_way(cast):
    assert [each.finish() for each in cast.all(works, 3)] == [0] * 3


def kinds(me, size):
    """Tensors that need gradients, of inference, views; what torch refuses is refused."""
    with world(me, size) as w:
        parameter = torch.ones(3, requires_grad=True)
        w.all_reduce(parameter)
        assert parameter.tolist() == [size] * 3
        assert parameter.is_leaf
        with torch.inference_mode():
            inside = torch.ones(3)
            w.all_reduce(inside)
        w.all_reduce(inside)
        assert inside.tolist() == [size * size] * 3
        w.broadcast(inside, 0)
        with torch.device("meta"):  # what multiworld makes for itself lies on the CPU
            w.all_reduce(parameter)
        assert parameter.tolist() == [size * size] * 3
        row = torch.ones(3, 4)[1]
        w.all_reduce(row)
        assert row.tolist() == [size] * 4
        # Elements in their order, whatever lies where.
        turned = (
            torch.arange(12.0).view(3, 4).t() if me.rank else torch.arange(12.0).view(3, 4).t().contiguous()
        )
        w.all_reduce(turned)
        assert torch.equal(turned, torch.arange(12.0).view(3, 4).t() * size)
        apart = [torch.zeros(2, 2)[:, 0] for _ in range(size)]
        w.all_gather(apart, torch.full((2, 3), float(me.rank))[:, 1])
        assert [each.tolist() for each in apart] == [[float(rank)] * 2 for rank in range(size)]
        w.reduce(turned, 0)
        with pytest.raises((ValueError, RuntimeError)):
            w.all_reduce(torch.ones(1).expand(3))  # whose elements share memory
        with pytest.raises((ValueError, RuntimeError)):
            w.all_gather([torch.ones(2)] * size, torch.ones(3))
        # A view of the result, as FSDP gives it.
        whole = torch.full((size,), float(me.rank))
        w.all_gather_into_tensor(whole, whole[me.rank : me.rank + 1])
        assert whole.tolist() == [float(rank) for rank in range(size)]
        w.barrier()


def test_all_kinds_of_tensors_mean_what_they_mean_in_torch(cast):
    assert [each.finish() for each in cast.all(kinds, 2)] == [0, 0]


def refused_here(me, size):
    """Each call is refused on one member, for its tensors, and made again there; the others make it once."""
    with world(me, size) as w:
        one, all_ = torch.ones(3), [torch.zeros(3) for _ in range(size)]
        shared = torch.zeros(1).expand(3)  # whose elements share memory
        counted = w._gen.lane.log.world
        before = counted.begun
        for turn in range(2 * size):
            if me.rank == turn % size:
                for wrong in (
                    lambda: w.all_reduce(shared),
                    lambda: w.all_gather([*all_[1:], shared], one),
                    lambda: w.broadcast(shared, 1 - me.rank),
                    lambda: w.reduce_scatter(shared, all_),
                    lambda: w.all_to_all([*all_[1:], shared], all_),
                ):
                    with pytest.raises(RuntimeError, match="apart in memory"):
                        wrong()
            t = torch.ones(3)
            w.all_reduce(t)
            assert t.tolist() == [size] * 3
            w.all_gather(all_, torch.full((3,), float(me.rank)))
            assert [each[0].item() for each in all_] == list(range(size))
            w.barrier()
        # As the watch over waiting operations counts them.
        assert counted.begun - before == 2 * size * 3


def test_a_call_that_is_refused_on_one_member_is_made_again_there(cast):
    assert [each.finish() for each in cast.all(refused_here, 2)] == [0, 0]


def overlapping(me, size):
    """Results that lie where another member's part of the input lies; gloo reads all of it first."""
    torch.set_num_threads(1)
    with world(me, size) as w:
        for count in (2, 1 << 20):
            factor = 10.0**me.rank
            wanted = [sum(10.0**rank for rank in range(size)) * (1 + at) for at in range(size)]
            for place in range(size):
                whole = (torch.arange(size * count) // count + 1) * factor
                out = whole[place * count : (place + 1) * count]
                w.reduce_scatter_tensor(out, whole)
                assert set(out.tolist()) == {wanted[me.rank]}, (count, place)
                whole = torch.full((size * count,), factor)
                w.all_gather_into_tensor(whole, whole[place * count : (place + 1) * count])
                assert torch.equal(whole, (10.0 ** (torch.arange(size * count) // count)).float()), (
                    count,
                    place,
                )
                given = [torch.full((count,), 1.0 + rank) for rank in range(size)]
                out = given[place] if me.rank == 0 else torch.zeros(count)
                w.scatter(out, given if me.rank == 0 else None, 0)
                assert set(out.tolist()) == {1.0 + me.rank}, (count, place)
                w.barrier()


def test_a_result_may_lie_in_another_member_s_part_of_the_input(cast):
    assert [each.finish() for each in cast.all(overlapping, 2)] == [0, 0]


def unlike(me, size):
    """Members whose tensors lie differently in memory, or have other shapes of the same size, decide alike."""
    with world(me, size) as w, w:
        apart = me.rank == 1
        out = torch.zeros(2 * size, 4)[:, ::2] if apart else torch.zeros(2 * size, 2)
        dist.all_gather_into_tensor(out, torch.full((2, 2), float(me.rank)))
        assert out.flatten().tolist() == [float(rank) for rank in range(size) for _ in range(4)]
        given = torch.ones(size, 4)[:, ::2] if apart else torch.ones(size, 2)
        out = torch.zeros(1, 2)
        dist.reduce_scatter_tensor(out, given)
        assert out.tolist() == [[size, size]]
        out = torch.zeros(size, 2) if apart else torch.zeros(2 * size)
        dist.all_to_all_single(out, torch.arange(2.0 * size) + 100 * me.rank)
        assert out.flatten().tolist() == [
            100.0 * rank + 2 * me.rank + at for rank in range(size) for at in range(2)
        ]
        # Some members call methods, others functions, while torch collects calls.
        room = torch.ones(3)
        with dist._coalescing_manager():
            (w if me.rank == 0 else dist).all_reduce(room)
        assert room.tolist() == [size] * 3
        # As programs call that use a ProcessGroup themselves.
        w.group.allreduce([room], dist.ReduceOp.MAX).wait()
        w.group.allreduce([room]).wait()
        assert room.tolist() == [size * size] * 3
        # Autograd is not told, as with gloo.
        x = torch.ones(4, requires_grad=True)
        y = x.exp()
        for op, args in (("all_reduce", ()), ("reduce", (0,)), ("broadcast", (1,))):
            with torch.no_grad():
                getattr(dist, op)(y, *args)
        y.sum().backward()
        assert y._version == 0


def test_members_decide_alike_whatever_only_one_of_them_has(cast):
    assert [each.finish() for each in cast.all(unlike, 2)] == [0, 0]


def left_by_an_error(me, size, lane):
    """An exception in a block of torch's coalescing manager: the next collectives are run, and not put to those."""
    os.environ["M8D_LANE"] = lane
    with world(me, size) as w, w:
        for manager in (dist._coalescing_manager, c10d._coalescing_manager, from_before):
            with contextlib.suppress(ZeroDivisionError), manager():
                dist.all_reduce(torch.ones(3))
                raise ZeroDivisionError
            for call in (w.all_reduce, dist.all_reduce):
                room = torch.ones(3)
                call(room)
                assert room.tolist() == [size] * 3
        # What was refused at the block's end, and what is put together as it should be.
        with pytest.raises(RuntimeError, match="same type"), dist._coalescing_manager():
            dist.all_reduce(torch.ones(3))
            dist.all_gather_into_tensor(torch.zeros(3 * size), torch.ones(3))
        with dist._coalescing_manager():
            dist.all_reduce(room)
        assert room.tolist() == [size * size] * 3
        # A block whose beginning was refused, of the group that stands for the present generation's.
        lasting = w.elastic_group
        with (
            mock.patch.object(dist.ProcessGroup, "_start_coalescing", side_effect=ZeroDivisionError),
            pytest.raises(ZeroDivisionError),
            dist._coalescing_manager(lasting, torch.device("cpu")),
        ):
            pass
        room = torch.ones(3)
        dist.all_reduce(room, group=lasting)
        assert room.tolist() == [size] * 3
        dist.all_reduce(room)
        assert room.tolist() == [size * size] * 3
        with pytest.raises(ValueError, match="non-empty"), dist._coalescing_manager():
            dist.all_reduce(room)
            with dist._coalescing_manager():
                pass
        dist.all_reduce(room)
        assert room.tolist() == [size**3] * 3


@pytest.mark.parametrize("lane", ["1", "p2p"])
def test_an_exception_in_a_coalesced_block_leaves_nothing_of_it(cast, lane):
    assert [each.finish() for each in cast.all(left_by_an_error, 2, lane=lane)] == [0, 0]


# -- which of them ----------------------------------------------------------------------------------------------------


def left_to_gloo(me, size, lane):
    os.environ["M8D_LANE"] = lane[me.rank]
    with world(me, size) as w:
        lanes = w._gen.lane is not None, w._gen.collectives is not None
        for op in GLOO_OPS:
            args, right = call(op, me.rank, size, 100, torch.float32, 0)
            WAYS["block"](w, op, args)
            assert right(), op
        me.emit("lanes", lanes=lanes)


@pytest.mark.parametrize(
    ("lane", "lanes"),
    [(("p2p", "p2p"), (True, False)), (("1", "p2p"), (True, False)), (("0", "1"), (False, False))],
)
def test_the_members_agree_to_leave_collectives_to_gloo(cast, lane, lanes):
    members = cast.all(left_to_gloo, 2, lane=lane)
    assert [tuple(each.expect("lanes").lanes) for each in members] == [lanes] * 2
    assert [each.finish() for each in members] == [0, 0]


def awaited(me, size):
    """Many tasks of one loop, of two worlds, in the same order on all members."""
    with world(me, size, name="a") as a, world(me, size, name="b") as b:

        async def main():
            rooms = [torch.full((count,), 1.0) for count in (1, 50_000, 2, 60_000)]
            await asyncio.gather(
                *(w.aio.all_reduce(room) for w, room in zip((a, b, a, b), rooms, strict=True))
            )
            assert [float(room.max()) for room in rooms] == [size] * 4
            await asyncio.gather(a.aio.barrier(), b.aio.barrier())

        asyncio.run(main())


def test_collectives_of_several_worlds_are_awaited_at_once(cast):
    assert [each.finish() for each in cast.all(awaited, 3)] == [0] * 3
