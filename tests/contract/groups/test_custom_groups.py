"""`multiworld.integrations`: groups that torch.distributed takes anywhere, and that break alone."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from kits.contract.stopkit import die_in_the_next_join
from kits.contract.worldkit import PATIENCE, SOON, left_over, outcome, threads_ended

import multiworld as mw
from multiworld._c10d.custom_group import CustomGroup
from multiworld.integrations import init_custom_process_group

LONG = 10 * PATIENCE
"""Seconds, of each operation and join: what ends before was ended by the verdict."""


def group_of(me, size, name="g", timeout=LONG):
    return init_custom_process_group("gloo", me.store, timeout, size, me.rank, group_name=name)


def everything(group, rank, size):
    t = torch.full((3,), float(rank))
    dist.broadcast(t, size - 1, group=group)
    assert t.tolist() == [size - 1.0] * 3
    dist.all_reduce(t, group=group)
    assert t[0].item() == size * (size - 1)
    dist.barrier(group=group)
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, size)
    assert dist.get_backend(group) == "gloo"
    found = [None] * size
    dist.all_gather_object(found, rank, group=group)
    assert found == list(range(size))
    works = [dist.broadcast(t, 0, group=group, async_op=True) for _ in range(3)]
    assert all(work.wait() for work in works)
    big = torch.full((1 << 20,), float(rank))
    dist.broadcast(big, src=0, group=group)
    assert big.sum().item() == 0


def uses_groups(me, size, default):
    if default == "own":  # of other members, with other ranks
        host, port = me.store.removeprefix("tcp://").split(":")
        met = dist.PrefixStore("default", dist.TCPStore(host, int(port), is_master=False))
        dist.init_process_group("gloo", store=met, rank=size - 1 - me.rank, world_size=size)
    for _ in range(2):
        group = group_of(me, size)
        everything(group, me.rank, size)
        other = mw.join("other", me.rank, size, store=me.store, timeout=LONG)
        with other:
            everything(group, me.rank, size)
        other.close()
        dist.barrier(group=group)
        dist.destroy_process_group(group)
        assert group.world.state is mw.State.CLOSED
        assert outcome(lambda group=group: dist.barrier(group=group))["kinds"][0] == "WorldClosedError"
    if default == "own":
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t.item() == size
        group = group_of(me, size, "again")
        dist.barrier(group=group)
        dist.destroy_process_group()
        assert group.world.state is mw.State.CLOSED, "as torch does with all groups"
    assert not c10d._world.pg_map
    me.emit("done")


@pytest.mark.parametrize("default", ["none", "own"])
def test_a_group_is_torchs_beside_any_other(cast, default):
    for each in cast.all(uses_groups, 3, default=default):
        each.expect("done")


def destroys_groups_in_blocks(me, size):
    other = mw.join("other", me.rank, size, store=me.store, timeout=LONG)
    with other:
        group = group_of(me, size)
        everything(group, me.rank, size)
        dist.destroy_process_group(group)
        assert group.world.state is mw.State.CLOSED
        dist.barrier()
        assert dist.get_world_size() == size
        kept, group = group_of(me, size), group_of(me, size, "another")
    with group.world:
        dist.destroy_process_group(group)
    assert group.world.state is mw.State.CLOSED
    with other:
        group = group_of(me, size, "another")
        other.close()
        assert c10d._resolve_process_group(group.group_name) is group
        everything(group, me.rank, size)
        dist.destroy_process_group(group)
    everything(kept, me.rank, size)
    dist.destroy_process_group(kept)
    assert not c10d._world.pg_map
    assert not [groups for tag, groups in c10d._world.tags_to_pg.items() if "m8d-group" in tag and groups]
    assert not mw.worlds()
    me.emit("done")


def test_a_group_is_destroyed_in_any_block(cast):
    for each in cast.all(destroys_groups_in_blocks, 2):
        each.expect("done")


def uses_a_group_inside_another_that_broke(me, size):
    group = group_of(me, size)
    other = mw.join("other", me.rank, size, store=me.store, timeout=LONG)
    with other:
        dist.barrier()
        if me.rank:
            other.close()
        else:
            assert outcome(lambda: dist.recv(torch.ones(1), 1))["kinds"][0] == "BrokenWorldException"
            assert outcome(dist.barrier)["kinds"][0] == "BrokenWorldException"
            assert outcome(lambda: dist.barrier(group=dist.group.WORLD))["kinds"][0] == "BrokenWorldException"
        everything(group, me.rank, size)
    dist.destroy_process_group(group)
    me.emit("done")


def test_a_group_works_inside_a_world_that_broke(cast):
    for each in cast.all(uses_a_group_inside_another_that_broke, 2):
        each.expect("done")


def in_two_groups(me, pairs):
    groups = {name: group_of(me_as(me, rank), 2, name) for name, rank in pairs}
    me.emit("in")
    for name in iter(me.hear, "end"):
        group, t = groups[name], torch.ones(1 << 16)
        told = outcome(lambda group=group, t=t: dist.broadcast(t, 1, group=group))
        me.emit("told", outcome=told)
        if told["kinds"]:
            time.sleep(2)  # by then its resources are released
            later = outcome(lambda group=group, t=t: dist.broadcast(t, 1, group=group))
            assert later == told
            assert later["kinds"][0] == "BrokenWorldException"
            dist.destroy_process_group(group)
            groups[name] = group_of(me_as(me, dict(pairs)[name]), 2, name)
            me.emit("again")


def me_as(me, rank):
    me.rank = rank
    return me


def test_a_killed_member_breaks_its_group_alone(cast):
    trainer = cast.start(in_two_groups, pairs=[("a", 0), ("b", 0)])
    a, b = (cast.start(in_two_groups, pairs=[(name, 1)]) for name in "ab")
    for each in (trainer, a, b):
        each.expect("in")
    trainer.say("a")
    began = a.kill()
    told = trainer.expect("told")
    assert told.outcome["cause"] == "crashed"
    assert told.at - began < SOON
    cast.start(in_two_groups, pairs=[("a", 1)])
    trainer.expect("again")
    for each in (trainer, b):
        each.say("b")
    for each in (trainer, b):
        assert each.expect("told").outcome["kinds"] == []
        each.say("end")


def dies_joining(me):
    die_in_the_next_join()
    group_of(me, 2)


def joins_until_it_works(me):
    began, tries = time.monotonic(), 0
    while True:
        tries += 1
        group = None
        try:
            group = group_of(me, 2, timeout=PATIENCE)
            dist.barrier(group=group)
            break
        except (mw.JoinError, mw.BrokenWorldException) as error:  # the other one may die just after its join
            me.emit("failed", kind=type(error).__name__)
            if group is not None:
                dist.destroy_process_group(group)
    me.emit("in", after=time.monotonic() - began)
    me.hear()


def test_a_member_that_is_killed_in_creation_holds_nobody_up(cast):
    first = cast.start(joins_until_it_works, 0)
    for _ in range(3):
        assert cast.start(dies_joining, 1).finish() == -signal.SIGKILL
    second = cast.start(joins_until_it_works, 1)
    for each in (first, second):
        assert each.expect("in").after < PATIENCE / 2, "it came before the timeout of one join"
        each.say("end")


def test_creation_is_bounded(tmp_path):
    began = time.monotonic()
    with pytest.raises(mw.JoinTimeoutError):
        init_custom_process_group("gloo", f"file://{tmp_path}/store", 1, 2, 0, group_name="alone")
    assert time.monotonic() - began < SOON
    assert not c10d._world.pg_map


def test_a_group_whose_making_is_interrupted_leaves_its_world(tmp_path, monkeypatch):
    enter = CustomGroup.enter

    def interrupted(group, backend):
        enter(group, backend)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CustomGroup, "enter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            init_custom_process_group("gloo", f"file://{tmp_path}/store", 5, 1, 0, group_name="one")
    assert mw.worlds() == {}
    group = init_custom_process_group("gloo", f"file://{tmp_path}/store", 5, 1, 0, group_name="one")
    dist.destroy_process_group(group)
    assert not c10d._world.pg_map


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "rank -1 of -1"),
        ({"rank": 0}, "rank 0 of -1"),
        ({"rank": 0, "world_size": 1, "pg_options": object()}, "pg_options of type object"),
        ({"rank": 0, "world_size": 1, "store": dist.HashStore(), "init_method": "env://"}, "and a store"),
    ],
)
def test_arguments_that_no_group_can_have(monkeypatch, arguments, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(mw.InvalidJoinError, match=message):
        init_custom_process_group("gloo", **arguments)


def test_what_the_environment_and_the_address_say(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    address = f"file://{tmp_path}/store?rank=0&world_size=1"
    group = init_custom_process_group("gloo", address)
    assert (group.rank(), group.size(), group.world.name) == (0, 1, "custom_process_group")
    dist.destroy_process_group(group)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(mw.InvalidJoinError, match="port"):
        init_custom_process_group("gloo", "env://")
    group = init_custom_process_group(None, store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group(group)


def test_groups_that_are_never_destroyed_do_not_pile_up(tmp_path):
    def again():
        group = init_custom_process_group("gloo", f"file://{tmp_path}/store", 5, 1, 0, group_name="one")
        group.world.close()

    again()
    before = left_over()
    for _ in range(5):
        again()
    assert len(c10d._world.pg_map) == 1
    after = left_over()
    assert (after["sockets"], after["fds"]) <= (before["sockets"], before["fds"])
    dist.destroy_process_group(next(iter(c10d._world.pg_map)))
    assert threads_ended() == []
