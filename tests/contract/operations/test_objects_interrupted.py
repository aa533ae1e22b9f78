"""Ctrl-C in a blocking operation of several steps: it goes on, and what is called after it is not taken for a part of it."""

from __future__ import annotations

import io
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from kits.contract.programkit import number, runs
from kits.contract.waykit import without_lane, world

import multiworld as mw
from multiworld.elastic import reshard


def interrupted(call, when):
    """Call it; Ctrl-C comes once `when` has returned."""

    def press():
        when()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        call()


def carried_on(cast, program, **arguments):
    """Rank 0 is interrupted, then rank 1 goes on, and both end well."""
    one, other = cast.all(program, 2, **arguments)
    one.expect("interrupted")
    other.say("go")
    assert [each.finish() for each in (one, other)] == [0, 0]


def until_pending(w, name):
    def look():
        while not any(each.kind == name for each in w.pending()):
            pass

    return look


def gathered(me, size, bare):
    """Rank 0 is interrupted while it waits for rank 1; the next collective has as many bytes as the objects."""
    with world(me, size) as w:
        found = [None] * size
        torch.save(me.rank, buffer := io.BytesIO())
        length = len(buffer.getvalue())
        if me.rank == 0:
            interrupted(lambda: w.all_gather_object(found, me.rank), until_pending(w, "all_gather"))
            me.emit("interrupted")
        else:
            me.hear()
            w.all_gather_object(found, me.rank)
            assert found == [0, 1]
        for turn in range(2):
            parts = [torch.zeros(length, dtype=torch.uint8) for _ in range(size)]
            mine = torch.full((length,), 10 * turn + me.rank, dtype=torch.uint8)
            if bare:
                with w:
                    dist.all_gather(parts, mine)
            else:
                w.all_gather(parts, mine)
            assert [part[0].item() for part in parts] == [10 * turn, 10 * turn + 1]
        assert w.state is mw.State.ACTIVE
        w.barrier()  # none has left before all have looked


@pytest.mark.parametrize("bare", [False, True], ids=["methods", "in a block"])
def test_a_collective_of_objects_is_carried_out_for_the_others(cast, bare):
    carried_on(cast, gathered, bare=bare)


def received(me, size):
    """Rank 0 is interrupted when it has the list's sizes and not its data."""
    with world(me, size) as w:
        if me.rank == 1:
            sizes, data = torch.tensor([3]), torch.tensor([1, 2, 3], dtype=torch.uint8)
            w.send(sizes, 0)
            me.hear()
            w.send(data, 0)
            for value in (1, 2):
                w.send(torch.full((3,), value, dtype=torch.uint8), 0)
        else:

            def has_sizes():
                while not w._turns.taken or not any(each.size == 3 for each in w.pending()):
                    pass

            interrupted(lambda: w.recv_object_list([None], 1), has_sizes)
            me.emit("interrupted")
            for value in (1, 2):
                w.recv(got := torch.zeros(3, dtype=torch.uint8), 1)
                assert got.tolist() == [value] * 3


def test_the_rest_of_a_list_is_received_and_no_message_taken_for_it(cast):
    carried_on(cast, received)


def taken_back(me, size):
    """Rank 0 is interrupted before anything has come: the list is for the next one that receives it."""
    with world(me, size) as w:
        if me.rank == 1:
            me.hear()
            w.send_object_list(["x"], 0)
        else:
            interrupted(lambda: w.recv_object_list([None], 1), until_pending(w, "recv"))
            me.emit("interrupted")
            w.recv_object_list(found := [None], 1)
            assert found == ["x"]


def test_a_list_of_which_nothing_has_come_is_for_the_next_receive(cast):
    carried_on(cast, taken_back)


def received_without_a_lane(me, size):
    """Rank 0 is interrupted in a receive of torch's, which goes on to its end, and has that list."""
    without_lane()
    with world(me, size) as w:
        if me.rank == 1:
            w.send_object_list(["first"], 0)
            me.hear()
            w.send_object_list(["lost"], 0)
            w.send_object_list(["last"], 0)
        else:
            w.recv_object_list(found := [None], 1)
            assert found == ["first"]
            interrupted(lambda: w.recv_object_list([None], 1), until_pending(w, "recv"))
            me.emit("interrupted")
            w.recv_object_list(found, 1)
            assert found == ["last"]


def test_without_a_lane_a_list_is_received_to_its_end(cast):
    carried_on(cast, received_without_a_lane)


def resharded(me, size):
    """Rank 0 is interrupted while it waits for rank 1, which has what it wants."""
    with world(me, size) as w:
        have, want = {"a": torch.full((2,), 3.0)}, {"a": torch.zeros(2)}
        if me.rank == 0:
            interrupted(lambda: reshard(w, None, want, 1), until_pending(w, "all_gather"))
            me.emit("interrupted")
            w.recv(got := torch.zeros(2), 1)
            assert got.tolist() == [5.0, 5.0]
        else:
            me.hear()
            assert reshard(w, have, {}, 1) == []
            w.send(torch.full((2,), 5.0), 0)
        w.all_reduce(total := torch.ones(2))
        assert total.tolist() == [2.0, 2.0]
        assert want["a"].tolist() == ([0.0, 0.0] if me.rank else [3.0, 3.0])


def test_a_reshard_is_carried_out_for_the_others(cast):
    carried_on(cast, resharded)


def both_send(me, size):
    """Each sends a list that does not fit anywhere before the other one receives it, and then more."""
    import asyncio

    large = torch.zeros(1 << 22)

    with world(me, size) as w:

        async def main():
            objects = [None]
            task = asyncio.create_task(w.aio.send_object_list([large], 1 - me.rank))
            await asyncio.sleep(0)
            work = w.isend(number(7), 1 - me.rank)
            await w.aio.recv_object_list(objects, 1 - me.rank)
            w.recv(got := number(), 1 - me.rank)
            work.wait()
            await task
            assert (objects[0].shape, got.item()) == (large.shape, 7)

        asyncio.run(main())
        w.barrier()


def test_a_message_after_a_list_waits_until_that_is_posted_not_received(cast):
    runs(cast, both_send, 2)
