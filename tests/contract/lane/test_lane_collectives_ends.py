"""Collectives over the lane that do not end as they should: sizes that differ, lost members, Ctrl-C, cancelling."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import re
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from kits.contract.collectiveforms import GLOO_OPS, OPS, WAYS, call
from kits.contract.waykit import forbid_memory, until_it_sleeps, world
from kits.contract.worldkit import HANG, PATIENCE, SOON, outcome
from kits.meetkit import until

import multiworld as mw
from multiworld._c10d.lane import reducing

KB, MB = 1 << 10, 1 << 20
TIMEOUT = 4 * PATIENCE
"""Seconds, of each operation: what ends before was ended by the verdict."""


# -- sizes ------------------------------------------------------------------------------------------------------------


def differing(me, size, counts, way):
    """One member gives another size: all hear of it at once, no process ends, and the world can be joined again."""
    with world(me, size, timeout=TIMEOUT) as w:
        began = time.monotonic()
        error = outcome(lambda: WAYS[way](w, "all_reduce", (torch.ones(counts[me.rank]),)))
        me.emit("raised", took=time.monotonic() - began, **error)
        again = w.rejoin() or w
        room = torch.ones(2)
        again.all_reduce(room)
        assert room.tolist() == [size] * 2


@pytest.mark.parametrize("way", ["method", "block", "awaited", "method_work"])
@pytest.mark.parametrize(
    "counts", [(1, 2), (1, 2, 2), (2, 2, 1), (100_000, 1), (15_000, 30_000), (1 << 20, 1 << 19)], ids=str
)
def test_sizes_that_differ_break_the_world_and_end_no_process(cast, counts, way):
    members = cast.all(differing, len(counts), counts=counts, way=way)
    seen = [each.expect("raised") for each in members]
    assert {each.kinds[0] for each in seen} == {"BrokenWorldException"}, seen
    assert max(each.took for each in seen) < SOON
    assert all(re.search(r": at rank \d: \w+: rank \d sent \d+ bytes, and", each.text) for each in seen), [
        each.text for each in seen
    ]
    assert all("M8D_CHECK=1 compares" in each.text for each in seen), [each.text for each in seen]
    assert [each.finish() for each in members] == [0] * len(counts)


def over_and_claimed(me, size):
    with world(me, size, timeout=TIMEOUT) as w:
        work = w.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        collective = work._collective
        collective._deadline = 0.0  # it was over long ago
        with collective._claim:  # as a thread has it that has just found it over
            thread = threading.Thread(target=collective.wait)
            thread.start()
            thread.join(SOON)
            assert not thread.is_alive()
        with collective._claim:
            collective.wait()
        w.barrier()


def test_a_collective_that_is_over_is_not_late(cast):
    assert [each.finish() for each in cast.all(over_and_claimed, 2)] == [0, 0]


def checked(me, size, lane):
    """M8D_CHECK=1: all members hear of it, each what the others called, and the world goes on."""
    os.environ["M8D_CHECK"], os.environ["M8D_LANE"] = "1", lane
    wrong = []

    def differ(way, calls, *said):
        op, args = calls[min(me.rank, len(calls) - 1)]
        try:
            WAYS[way](w, op, args)
        except mw.CollectiveMismatchError as error:
            if not all(each in str(error) for each in said) or len(error.calls) != size:
                wrong.append((way, said, str(error)))
        else:
            wrong.append((way, said, "nothing raised"))

    with world(me, size) as w:
        for way in WAYS:
            for op in OPS if lane == "1" else GLOO_OPS:
                args, right = call(op, me.rank, size, 1000, torch.float32, size - 1)
                WAYS[way](w, op, args)
                if not right():
                    wrong.append((way, op))
            one, two = torch.ones(1), torch.ones(2)
            differ(way, [("all_reduce", (one,)), ("all_reduce", (two,))], "rank 0 called all_reduce of 4 bytes",
                   "all_reduce of 8 bytes")  # fmt: skip
            differ(
                way,
                [("all_reduce", (one,)), ("broadcast", (one, 0))],
                "broadcast of 4 bytes of float32, root 0",
            )
            differ(way, [("broadcast", (one, 1)), ("broadcast", (one, 0))], "root 1", "root 0")
            differ(way, [("all_reduce", (one,)), ("all_reduce", (one, dist.ReduceOp.MAX))], "SUM", "MAX")
            differ(
                way, [("barrier", ()), ("all_reduce", (one.to(torch.int32),))], "called barrier", "of int32"
            )
        assert w.state is mw.State.ACTIVE
        me.emit("wrong", wrong=wrong)
        w.barrier()


@pytest.mark.parametrize("lane", ["1", "p2p"])
def test_with_check_all_members_hear_what_each_called_and_the_world_goes_on(cast, lane):
    members = cast.all(checked, 3, lane=lane)
    assert [each.expect("wrong").wrong for each in members] == [[]] * 3
    assert [each.finish() for each in members] == [0] * 3


def unchecked(me, size):
    os.environ["M8D_CHECK"] = str(me.rank)
    with world(me, size) as w:
        room = torch.ones(1)
        w.all_reduce(room)
        me.emit("checks", checks=w._gen.collectives.checks)
        me.hear()


def test_nothing_is_compared_where_a_member_does_not_want_it(cast):
    members = cast.all(unchecked, 2)
    assert [each.expect("checks").checks for each in members] == [False, False]
    for each in members:
        each.say("end")
    assert [each.finish() for each in members] == [0, 0]


# -- lost members -----------------------------------------------------------------------------------------------------


def survivor(me, size, nbytes, way, memory, hang):
    """Reduce with all others, again and again, until one is lost."""
    torch.set_num_threads(1)
    if not memory:
        forbid_memory()
    w = mw.join("w", me.rank, size, store=me.store, timeout=TIMEOUT, hang_timeout=hang)
    other = (
        mw.join("other", me.rank, size - 1, store=me.store, timeout=TIMEOUT) if me.rank < size - 1 else None
    )
    room, times = torch.ones(nbytes // 4), 0
    w.barrier()
    me.emit("begun")
    try:
        while True:
            WAYS[way](w, "all_reduce" if times % 3 else "all_gather_into_tensor" if nbytes > 4 else "barrier",
                      (room,) if times % 3 else (torch.empty(size * room.numel()), room) if nbytes > 4 else ())  # fmt: skip
            times += 1
    except mw.BrokenWorldException as error:
        me.emit("raised", cause=str(error.cause), ranks=list(error.ranks), times=times, text=str(error))
    assert other is not None
    other.all_reduce(room)
    other.barrier()
    w.close()
    other.close()


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize(
    ("nbytes", "way", "memory"),
    [(4, "method", True), (4, "awaited", True), (MB, "block", True), (MB, "awaited", False),
     (64 * MB, "method", True), (64 * MB, "method_work", False)],
)  # fmt: skip
def test_a_lost_member_raises_in_all_others_in_the_middle_of_any_size(cast, nbytes, way, memory, how):
    size = 4
    hang = HANG if how == "stop" else TIMEOUT
    members = cast.all(survivor, size, nbytes=nbytes, way=way, memory=memory, hang=hang)
    for member in members:
        member.expect("begun")
    time.sleep(0.3 + random.random() / 2)  # noqa: S311  (a moment in the middle of anything)
    lost = members[-1]
    at = lost.kill() if how == "kill" else time.monotonic()
    if how == "stop":
        os.kill(lost.process.pid, signal.SIGSTOP)
    for member in members[:-1]:
        seen = member.expect("raised")
        assert (seen.cause, seen.ranks) == ("crashed" if how == "kill" else "hung", [size - 1]), seen
        assert seen.at - at < SOON + (0 if how == "kill" else HANG)
    assert [member.finish() for member in members[:-1]] == [0] * (size - 1)
    if how == "stop":
        lost.kill()


# -- Ctrl-C, cancelling -----------------------------------------------------------------------------------------------


def interrupt_its_waiting(w):
    """Have Ctrl-C come in the main thread once it waits."""
    until_it_sleeps(w)
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(me, size, count):
    """Rank 0 gives up waiting; the collective goes on without its caller, and all others get the result."""
    torch.set_num_threads(1)
    with world(me, size) as w:
        room = torch.ones(count)
        for number in range(3):
            room.fill_(1)
            w.barrier()
            if me.rank == 0:
                interrupter = threading.Thread(target=interrupt_its_waiting, args=(w,))
                interrupter.start()
                with pytest.raises(KeyboardInterrupt):
                    if number == 0:
                        w.all_reduce(room)
                    elif number == 1:
                        with w:
                            dist.all_reduce(room)
                    else:
                        w.all_reduce(room, async_op=True).wait()
                me.emit("interrupted")
            else:
                me.hear()
                w.all_reduce(room)
                assert room.tolist() == [size] * count
            # What comes next waits for nothing of it; and its result is there, too.
            after = torch.ones(1)
            w.all_reduce(after)
            assert after.item() == size
            w.barrier()
            deadline = time.monotonic() + PATIENCE
            while not bool((room == size).all()):
                assert time.monotonic() < deadline
        assert w.state is mw.State.ACTIVE
        w.barrier()  # none has left before all have looked


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_ctrl_c_ends_the_waiting_and_not_the_collective(cast, count):
    members = cast.all(interrupted, 3, count=count)
    for _ in range(3):
        members[0].expect("interrupted")
        for member in members[1:]:
            member.say("go on")
    assert [each.finish() for each in members] == [0] * 3


def interrupted_while_it_reduces(me, size):
    with world(me, size) as w:
        room = torch.ones(1000)
        if me.rank == 0:
            reducing._OF_NUMBERS[hash(dist.ReduceOp.SUM)] = raises_interrupt
            with pytest.raises(KeyboardInterrupt):
                w.all_reduce(room)
        else:
            seen = outcome(lambda: w.all_reduce(room))
            me.emit("seen", **seen)
        until(lambda: w.state is mw.State.BROKEN)


def raises_interrupt(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_in_the_middle_of_a_reduction_breaks_the_world_at_once(cast):
    """What this member has reduced so far is not known: the others do not wait for it until their timeout."""
    members = cast.all(interrupted_while_it_reduces, 3)
    for each in members[1:]:
        assert each.expect("seen", SOON).cause == "failed"
    assert [each.finish() for each in members] == [0] * 3


def cancelled(me, size, count):
    with world(me, size) as w:
        room = torch.ones(count)

        async def main():
            if me.rank == 0:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(w.aio.all_reduce(room), 0.2)
                me.emit("cancelled")
            else:
                await asyncio.to_thread(me.hear)
                await w.aio.all_reduce(room)
                assert float(room.sum()) == size * count
            await w.aio.barrier()

        asyncio.run(main())
        deadline = time.monotonic() + PATIENCE
        while not bool((room == size).all()):
            assert time.monotonic() < deadline


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_a_cancelled_collective_goes_on(cast, count):
    members = cast.all(cancelled, 3, count=count)
    members[0].expect("cancelled")
    for member in members[1:]:
        member.say("go on")
    assert [each.finish() for each in members] == [0] * 3


def differing_alone(me, size):
    """What a failed collective leaves behind is freed without the garbage collector."""
    with world(me, size) as w:
        gc.disable()
        with w:
            work = dist.all_reduce(torch.ones(4 + me.rank), async_op=True)
        kept = [weakref.ref(work)]
        error = outcome(work.wait)
        assert error["kinds"][0] == "BrokenWorldException", error
        future = work.get_future()
        assert "BrokenWorldException" in outcome(future.wait)["kinds"][0] + outcome(future.wait)["text"]
        kept.append(weakref.ref(future))
        del work, future
        deadline = time.monotonic() + PATIENCE
        while left := [
            each() for each in kept if each() is not None
        ]:  # the pool's thread may be about to let go
            assert time.monotonic() < deadline, [gc.get_referrers(each) for each in left]
            del left
        gc.enable()


def test_a_failed_collective_leaves_nothing_behind(cast):
    assert [each.finish() for each in cast.all(differing_alone, 2)] == [0, 0]


def fair(me, size):
    """Collectives that are over at once leave the loop its turns."""
    turns, times = 0, 120  # what a connection takes that the other end does not read
    with world(me, size) as w:

        async def main():
            nonlocal turns
            over = False

            async def other():
                nonlocal turns
                while not over:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())
            for _ in range(times):
                await w.aio.broadcast(torch.ones(1), 0)
            over = True
            await task

        if me.rank:
            me.hear()
        asyncio.run(main())
        me.emit("turns", turns=turns)
        w.barrier()


def test_a_loop_gets_its_turns_between_collectives_that_are_over_at_once(cast):
    members = cast.all(fair, 2)
    members[0].expect("turns")
    members[1].say("go on")
    assert members[1].expect("turns").turns >= 120 / 10
    assert [each.finish() for each in members] == [0, 0]


# -- the profiler -----------------------------------------------------------------------------------------------------


def profiled(me, size, lane):
    os.environ["M8D_LANE"] = lane
    found = {}
    with world(me, size) as w:
        for op, way in itertools.product(
            ("all_reduce", "broadcast", "all_gather", "barrier"), ("method", "block")
        ):
            args, _ = call(op, me.rank, size, 6, torch.float32, 0)
            with torch.profiler.profile(record_shapes=True) as profile:
                WAYS[way](w, op, args)
            found[op + " " + way] = sorted(
                (each.name, str(each.input_shapes) if each.name.startswith("gloo:") else "")
                for each in profile.events()
                if each.name.startswith(("gloo:", "c10d:"))
            )
    me.emit("found", found=found)


def test_the_profiler_shows_what_it_shows_of_gloo(cast):
    found = {}
    for lane in ("1", "p2p"):
        members = cast.all(profiled, 2, lane=lane)
        found[lane] = [each.expect("found").found for each in members]
        assert [each.finish() for each in members] == [0, 0]
    assert found["1"] == found["p2p"]
