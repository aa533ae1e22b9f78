"""Messages of process groups inside of a world: each group's are its own, and ranks are the group's."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import inspect
import itertools
import os
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from kits.contract.waykit import RECEIVES, SENDS, world
from kits.contract.worldkit import HANG, PATIENCE
from kits.meetkit import until

import multiworld as mw
from multiworld._core.lane import frames


def one(value):
    return torch.full((1,), float(value))


def pairs(me, size):
    """What is sent in any way is received in any other."""
    with world(me, size) as w:
        wrong = []
        for number, (send, receive) in enumerate(itertools.product(SENDS, RECEIVES)):
            if me.rank == 0:
                SENDS[send](w, one(number), 1)
            else:
                room = torch.zeros(1)
                RECEIVES[receive](w, room, 0)
                if room.item() != number:
                    wrong.append((send, receive, room.item()))
        # Objects, too, between the block's functions and the methods.
        plain = {"a": [1, 2.5, None], "b": torch.arange(3)}
        if me.rank == 0:
            w.send_object_list([plain, "x"], 1)
            asyncio.run(w.aio.send_object_list([plain, "x"], 1))
            with w:
                dist.send_object_list([plain, "x"], 1)
                dist.send_object_list([plain, "x"], 1)
        else:
            for number in range(4):
                got = [None, None]
                if number == 0:
                    asyncio.run(w.aio.recv_object_list(got, 0))
                elif number == 1:
                    assert w.recv_object_list(got) == 0
                else:
                    with w:
                        assert dist.recv_object_list(got, 0) == 0  # torch 2.13 wants a source
                if got[1] != "x" or got[0]["a"] != plain["a"] or got[0]["b"].tolist() != [0, 1, 2]:
                    wrong.append((number, got))
        w.barrier()
        me.emit("wrong", wrong=wrong)


def test_what_any_way_sends_any_way_receives(cast):
    members = cast.all(pairs, 2)
    assert members[1].expect("wrong").wrong == []
    assert [each.finish() for each in members] == [0, 0]


def other_end(name, in_group, in_world):
    """The argument that names the other end: by its rank in the group, which torch takes from 2.6 on."""
    if f"group_{name}" in inspect.signature(dist.send if name == "dst" else dist.recv).parameters:
        return {f"group_{name}": in_group}
    return {name: in_world}


def grouped(me, size):
    """Four members; groups of the odd ones, of all backwards, twice of the same ranks."""
    with world(me, size) as w, w:
        assert w._gen.lane is not None
        twins = [dist.new_group([1, 2, 3]) for _ in range(2)]
        pair = dist.new_group([3, 1], use_local_synchronization=False)
        if me.rank == 0:
            w.barrier()
            return
        groups = {None: one(1), twins[0]: one(2), twins[1]: one(3)}
        if me.rank == 1:
            # All at once, posted in another order than they are sent in.
            rooms = {group: torch.zeros(1) for group in groups}
            works = [dist.irecv(rooms[group], 3, group=group) for group in groups]
            dist.send(one(0), 3)
            for work in works:
                work.wait()
            assert [rooms[group].item() for group in groups] == [1, 2, 3]
        elif me.rank == 3:
            dist.recv(torch.zeros(1), 1)
            for group in reversed(groups):
                dist.send(groups[group], 1, group=group)
        # Ranks of the group: 2 of the world is 1 of a twin.
        if me.rank == 2:
            dist.send(one(7), group=twins[0], **other_end("dst", 0, 1))
            dist.send(one(8), group=twins[0], **other_end("dst", 2, 3))
        else:
            room = torch.zeros(1)
            assert dist.recv(room, group=twins[0], **other_end("src", 1, 2)) == 2
            assert room.item() == (7 if me.rank == 1 else 8)
        # Any source: a message of another group, or of none, is never taken; the rank is the world's.
        if me.rank == 3:
            dist.send(one(1), 1)
            dist.send(one(2), 1, group=twins[1])
            dist.send(one(3), 1, group=pair)
            dist.send(one(4), 1, group=twins[0])
        elif me.rank == 1:
            for group, value in ((pair, 3), (twins[0], 4), (twins[1], 2), (None, 1)):
                room = torch.zeros(1)
                assert dist.recv(room, group=group) == 3
                assert room.item() == value
            work = dist.irecv(room, group=twins[1], tag=9)
        if me.rank == 2:
            dist.send(one(5), 1, group=twins[1], tag=9)
        elif me.rank == 1:
            work.wait()
            # torch's own meaning: of a Work of a group it is the rank in that group
            assert work.source_rank() == 1
        w.barrier()


def test_groups_keep_their_messages_apart(cast):
    assert [each.finish() for each in cast.all(grouped, 4)] == [0, 0, 0, 0]


def destroyed(me, size):
    with world(me, size) as w:
        with w:
            gone = []
            for _ in range(3):
                group = dist.new_group([0, 1])
                if me.rank == 0:
                    dist.send(one(1), 1, group=group)
                    dist.send(one(2), 1, group=group)  # stays unread
                else:
                    room = torch.zeros(1)
                    dist.recv(room, 0, group=group)
                    assert room.item() == 1
                gone.append(weakref.ref(group))
                dist.barrier()
                dist.destroy_process_group(group)
                del group
                gc.collect()
            # Another group of the same ranks: what was left unread is not its.
            group = dist.new_group([0, 1])
            if me.rank == 0:
                dist.send(one(9), 1, group=group)
            else:
                room = torch.zeros(1)
                dist.recv(room, 0, group=group)
                assert room.item() == 9
            dist.barrier()
        known = len(w._gen.c10d.lane._known)
        me.emit("gone", gone=[each() is None for each in gone], known=known)


def test_groups_that_are_destroyed_are_gone(cast):
    for each in cast.all(destroyed, 2):
        seen = each.expect("gone")
        assert seen.gone == [True] * 3
        assert seen.known <= 2  # the world's own, and the last
        assert each.finish() == 0


def unread(me, size):
    """More messages that no receive takes than the others' credit is for, in groups that are destroyed."""
    with world(me, size) as w:
        for number in range(10):
            with w:
                group = dist.new_group([0, 1])
                if me.rank == 0:
                    for _ in range(20):
                        dist.send(torch.zeros(12_000), 1, group=group)
                    posted = dist.isend(torch.zeros(1 << 20), 1, group=group)
                dist.barrier()
                dist.destroy_process_group(group)
                if me.rank == 0:
                    posted.wait()
            me.emit("round", number=number)
            w.barrier()
        me.emit("credit", left=w._gen.lane.endpoint._core.peers[1 - me.rank].outgoing._credit)
        w.barrier()


def test_what_is_unread_in_a_destroyed_group_costs_nothing(cast):
    members = cast.all(unread, 2)
    for each in members:
        assert each.expect("credit").left > frames.BUDGET // 2
    assert [each.finish() for each in members] == [0, 0]


def meshes(me, size):
    from torch.distributed.device_mesh import init_device_mesh

    with world(me, size) as w, w:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        inner = {name: mesh.get_group(name) for name in ("row", "column")}
        for name, group in inner.items():
            own = dist.get_rank(group)
            other = dist.get_global_rank(group, 1 - own)
            work = dist.isend(one(10 * me.rank + len(name)), other, group=group)
            room = torch.zeros(1)
            assert dist.recv(room, group=group) == other
            assert room.item() == 10 * other + len(name)
            work.wait()
        w.barrier()


def test_groups_of_a_device_mesh(cast):
    assert [each.finish() for each in cast.all(meshes, 4)] == [0] * 4


class Meeting(weakref.WeakKeyDictionary):
    """What is known of a world's groups; two threads that look one up at first see nothing there, both."""

    both = threading.Barrier(2)

    def get(self, *args):
        found = super().get(*args)
        if found is None:
            self.both.wait(PATIENCE)
        return found


def first_messages(me, size):
    """Threads that are the first to send in a group, at the same moment: none of them takes another way."""
    with world(me, size) as w:
        with w:
            group = dist.new_group([0, 1])
        if me.rank == 0:  # a message that went another way would not arrive here
            w._gen.c10d.lane._known = Meeting()
        errors = []

        def run(tag):
            try:
                with w:
                    if me.rank == 0:
                        dist.send(one(tag), 1, group=group, tag=tag)
                    else:
                        room = torch.zeros(1)
                        dist.recv(room, 0, group=group, tag=tag)
                        assert room.item() == tag
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=run, args=(tag,)) for tag in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert errors == []
        w.barrier()


def test_threads_that_are_first_in_a_group(cast):
    assert [each.finish(2 * PATIENCE) for each in cast.all(first_messages, 2)] == [0, 0]


def _optional(kind, name):
    found = inspect.signature(kind).parameters.get(name)
    return found is not None and found.default is not inspect.Parameter.empty


def pipelined(me, size):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(3)
    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
    given, wanted = torch.randn(4, 8), torch.randn(4, 8)

    def loss(output, target):
        return ((output - target) ** 2).sum()

    with world(me, size) as w, w:
        # Older torch is told what comes, and does not scale.
        told = {} if _optional(PipelineStage, "input_args") else {"input_args": (torch.zeros(2, 8),)}
        stage = PipelineStage(layers[me.rank], me.rank, 2, torch.device("cpu"), **told)
        plain = {"scale_grads": False} if _optional(Schedule1F1B, "scale_grads") else {}
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss, **plain)
        if me.rank == 0:
            schedule.step(given)
        else:
            output = schedule.step(target=wanted)
        mine = layers[me.rank].weight.grad.clone()
        for each in layers:
            each.zero_grad()
        whole = layers[1](layers[0](given))
        loss(whole, wanted).backward()
        assert torch.allclose(mine, layers[me.rank].weight.grad, atol=1e-4)
        if me.rank == 1:
            assert torch.allclose(output, whole, atol=1e-5)
        w.barrier()


@pytest.mark.filterwarnings("default")
def test_torchs_pipelines(cast):
    assert [each.finish() for each in cast.all(pipelined, 2)] == [0, 0]


def limits(me, size):
    """A message keeps to the timeout that its group was given, longer or shorter than the world's."""
    with world(me, size, timeout=3.0) as w, w:
        patient = dist.new_group(timeout=dt.timedelta(seconds=PATIENCE))
        room = torch.zeros(1)
        if me.rank == 0:
            me.hear()
            dist.send(one(4), 1, group=patient)
        else:
            began = time.monotonic()
            work = dist.irecv(room, 0, group=patient)
            threading.Timer(4.0, me.emit, ("waited",)).start()
            work.wait()
            assert time.monotonic() - began > 3
            assert room.item() == 4
    with world(me, size, name="v") as v:
        with pytest.raises(mw.BrokenWorldException) if me.rank else contextlib.nullcontext(), v:
            hasty = dist.new_group(timeout=dt.timedelta(seconds=HANG))
            if me.rank == 1:
                dist.recv(room, 0, group=hasty)
        if me.rank == 0:
            until(lambda: v.breakage is not None)
        me.emit("detail", detail=v.breakage.detail)


def test_the_timeout_of_a_group_is_that_of_its_messages(cast):
    members = cast.all(limits, 2)
    members[1].expect("waited")
    members[0].say("go on")
    assert f"no message within {HANG:g} s" in members[1].expect("detail").detail
    assert [each.finish() for each in members] == [0, 0]


def unlimited(me, size):
    """A group that was given no timeout, in a world without the lane, has the world's."""
    os.environ["M8D_LANE"] = "0"
    with world(me, size, timeout=3.0) as w, w:
        patient = dist.new_group(timeout=dt.timedelta(minutes=30))  # torch's default, and given
        if me.rank == 1:
            time.sleep(5)
        dist.all_reduce(one(1), group=patient)
        group = dist.new_group()
        if me.rank == 0:
            with pytest.raises(mw.BrokenWorldException):
                dist.all_reduce(one(1), group=group)
            me.emit("raised")
        else:
            me.hear()


def test_a_group_without_a_timeout_has_the_worlds(cast):
    members = cast.all(unlimited, 2)
    members[0].expect("raised", timeout=PATIENCE)
    members[1].say("go on")
    assert [each.finish() for each in members] == [0, 0]
