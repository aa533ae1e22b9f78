"""Worlds in secure mode: mutual TLS on every connection, and what has none is refused."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.worldkit import PATIENCE, SOON, enter_netns, free_port, left_over, outcome
from kits.netkit import Network
from kits.tlskit import Files, authority
from torch.nn.parallel import DistributedDataParallel

import multiworld as mw

CARRIES_GROUPS = hasattr(
    getattr(getattr(torch._C._distributed_c10d, "FakeProcessGroup", None), "Options", None),
    "error_on_collective",
)
groups_stand = pytest.mark.skipif(
    not CARRIES_GROUPS, reason="this torch has no backend that refuses collectives"
)


@pytest.fixture(scope="module")
def ours():
    return authority("job")


@pytest.fixture
def files(tmp_path, ours):
    """Makes the files of a member and returns its environment."""

    def make(name="member", by=ours, **more):
        return Files(tmp_path / name, by, name=name, **more).environment

    return make


@pytest.fixture
def start(cast):
    """Starts a member of a world whose store is served by rank 0."""
    store = f"tcp://127.0.0.1:{free_port()}"

    def begin(program, rank=0, **arguments):
        return cast.start(program, rank, store=store, **arguments)

    return begin


def joined(me, size, environ, **more):
    os.environ.update(environ)
    given = {"store": me.store, "timeout": SOON}
    return mw.join("w", me.rank, size, **(given | more))


def everything(me, size, environ):
    """What the lane carries, in all ways to call it, small and large, among all and some."""
    w = joined(me, size, environ)
    others = [rank for rank in range(size) if rank != me.rank]
    big = torch.arange(600_000, dtype=torch.float32)
    w.all_reduce(big)
    assert torch.equal(big, torch.arange(600_000, dtype=torch.float32) * size)
    for peer in others:
        if me.rank < peer:
            w.send(big, peer)
        else:
            got = torch.empty_like(big)
            w.recv(got, peer)
            assert torch.equal(got, big)

    async def awaited():
        t = torch.ones(3)
        await w.aio.all_reduce(t)
        return t[0].item()

    assert asyncio.run(awaited()) == size
    told = [None] * size
    w.all_gather_object(told, {"rank": me.rank})
    assert [each["rank"] for each in told] == list(range(size))
    if CARRIES_GROUPS:
        with w:
            t = torch.full((70_000,), float(me.rank))
            dist.broadcast(t, 1)
            assert t[-1].item() == 1
            out = torch.empty(size * 2)
            dist.all_to_all_single(out, torch.full((size * 2,), float(me.rank)))
            assert out.tolist() == [float(at // 2) for at in range(size * 2)]
            pair = dist.new_group([0, 1])
            if me.rank < 2:
                t = torch.ones(4)
                dist.all_reduce(t, group=pair)
                assert t[0].item() == 2
            alone = dist.new_group([2])
            if me.rank == 2:
                t = torch.ones(4)
                dist.all_reduce(t, group=alone)
                assert t[0].item() == 1
            dist.barrier()
    me.emit("worked")
    me.hear()
    w.close()
    me.emit("left", **left_over())


def test_all_that_the_lane_carries_works(start, files):
    members = [start(everything, rank, size=3, environ=files(f"m{rank}")) for rank in range(3)]
    for each in members:
        each.expect("worked")
    for each in members:
        each.say("go on")
    for each in members:
        each.expect("left")
        each.expect("end")


def refused(me, size, environ):
    w = joined(me, size, environ)

    def inside(call):
        with w:  # its end tells what torch says in C++
            call()

    calls = {
        "ddp": lambda: DistributedDataParallel(torch.nn.Linear(2, 2)),
        "elastic ddp": lambda: DistributedDataParallel(torch.nn.Linear(2, 2), process_group=w.elastic_group),
        "monitored": dist.monitored_barrier,
        "other": lambda: dist.new_group(backend="fake"),
        "bool": lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool)),
        "method": lambda: w.all_reduce(torch.ones(2, dtype=torch.bool)),
    }
    seen = {name: outcome(lambda call=call: inside(call)) for name, call in calls.items()}
    t = torch.ones(1)
    w.all_reduce(t)  # the world goes on
    me.emit("seen", seen=seen, value=t.item())
    me.hear()
    w.close()


@groups_stand
def test_what_would_go_over_gloo_is_refused_and_the_world_goes_on(start, files):
    members = [start(refused, rank, size=2, environ=files(f"m{rank}")) for rank in range(2)]
    for each in members:
        told = each.expect("seen")
        for name, found in told.seen.items():
            assert found["kinds"][:1] == ["UnencryptedError"], (name, found)
            assert "M8D_TLS_PLAIN=gloo" in found["text"], (name, found)
        assert told.value == 2
    for each in members:
        each.say("go on")
        each.expect("end")


def trains(me, size, environ):
    w = joined(me, size, environ)
    with w:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
    me.emit("trained", grad=model.module.weight.grad.tolist())
    me.hear()
    w.close()


def test_gloo_connects_where_it_is_allowed(start, files):
    members = [
        start(trains, rank, size=2, environ={**files(f"m{rank}"), "M8D_TLS_PLAIN": "gloo"})
        for rank in range(2)
    ]
    for each in members:
        assert each.expect("trained").grad == [[1.0, 1.0]]
    for each in members:
        each.say("go on")
        each.expect("end")


def tries(me, environ, size=2, **more):
    os.environ.update(environ)
    me.emit(
        "tried",
        **outcome(
            lambda: mw.join("w", me.rank, size, store=me.store, timeout=more.pop("timeout", 3), **more)
        ),
    )


@pytest.mark.parametrize(
    ("environ", "more", "words"),
    [
        ({"M8D_TLS_KEY": ""}, {}, "All three are set, or none"),
        ({"M8D_LANE": "0"}, {}, "M8D_LANE"),
        ({"M8D_LANE": "p2p"}, {}, "M8D_LANE"),
        ({}, {"backend": "cpu:gloo,cuda:nccl"}, "M8D_TLS_PLAIN=nccl"),
        ({}, {"backend": "mpi"}, "mpi connects without TLS"),
        ({"M8D_TLS_CA": "/no/such/file"}, {}, "No such file"),
    ],
)
def test_a_join_that_cannot_be_secure_is_refused_at_once(start, files, environ, more, words):
    began = time.monotonic()
    told = start(tries, 0, environ={**files(), **environ}, **more).expect("tried")
    assert words in told.text, told
    assert time.monotonic() - began < SOON


def test_processes_without_a_certificate_of_the_job_do_not_get_in(start, files, tmp_path):
    """The first member waits all the while, and is joined by the right one afterwards."""

    def others(**environ):
        return start(tries, 1, environ=environ)

    first = start(everything_small, 0, size=2, environ=files("m0"))
    first.expect("begins")
    theirs = authority("job")
    told = {
        "none": others().expect("tried"),
        "another authority": others(**Files(tmp_path / "x", theirs).environment).expect("tried"),
        "another job": others(
            **Files(tmp_path / "y", type(theirs)("other", theirs._certificate, theirs._key)).environment
        ).expect("tried"),
    }
    assert "M8D_TLS" in told["none"].text, told["none"]
    assert all("JoinError" in each.kinds for each in told.values()), told
    second = start(everything_small, 1, size=2, environ=files("m1"))
    for each in (first, second):
        each.expect("worked")
    for each in (first, second):
        each.say("go on")
        each.expect("end")


def everything_small(me, size, environ):
    me.emit("begins")
    w = joined(me, size, environ, timeout=PATIENCE)
    t = torch.ones(1)
    w.all_reduce(t)
    me.emit("worked", value=t.item())
    me.hear()
    w.close()


def breaks(me, size, environ):
    w = joined(me, size, environ)
    me.emit("joined")
    try:
        while True:
            w.all_reduce(torch.ones(300_000))
    except mw.BrokenWorldException as error:
        me.emit("broke", cause=error.cause, ranks=list(error.ranks))
    w.rejoin(timeout=SOON)
    t = torch.ones(1)
    w.all_reduce(t)
    me.emit("again", value=t.item(), generation=w.generation)
    me.hear()
    w.close()


def test_a_killed_member_is_found_and_replaced_while_keys_change(start, tmp_path, ours):
    files = [Files(tmp_path / f"m{rank}", ours) for rank in range(3)]
    members = [start(breaks, rank, size=3, environ=files[rank].environment) for rank in range(3)]
    for each in members:
        each.expect("joined")
    for each in files:
        each.replace(ours, name="renewed")
    members[2].kill()
    for each in members[:2]:
        assert each.expect("broke").ranks == [2]
    fresh = start(breaks_not, 2, size=3, environ=files[2].environment)
    for each in (*members[:2], fresh):
        again = each.expect("again")
        assert (again.value, again.generation) == (3, 2)
    for each in (*members[:2], fresh):
        each.say("go on")
        each.expect("end")


def breaks_not(me, size, environ):
    w = joined(me, size, environ)
    t = torch.ones(1)
    w.all_reduce(t)
    me.emit("again", value=t.item(), generation=w.generation)
    me.hear()
    w.close()


def of_host(me, netns, size, environ):
    enter_netns(netns)
    socket.gethostname = lambda: f"host{me.rank}"  # what the namespaces share
    w = joined(me, size, environ, store="tcp://10.79.0.1:29500")
    t = torch.ones(1_000_000)  # beyond the bound for several hosts
    w.all_reduce(t)
    parts = [torch.empty(3) for _ in range(size)]
    w.all_to_all(parts, [torch.full((3,), float(me.rank)) for _ in range(size)])
    me.emit("worked", value=t[-1].item(), parts=[each[0].item() for each in parts])
    me.hear()
    w.close()


def test_members_on_several_hosts(start, files):
    with Network(3) as network:
        members = [
            start(
                of_host,
                rank,
                netns=network.hosts[rank],
                size=3,
                environ=files(f"m{rank}", host=f"host{rank}"),
            )
            for rank in range(3)
        ]
        for each in members:
            told = each.expect("worked")
            assert (told.value, told.parts) == (3, [0, 1, 2])
        for each in members:
            each.say("go on")
            each.expect("end")


def turns(me, environ):
    """Joins a world without TLS; then one in secure mode, beside it."""
    store = f"tcp://127.0.0.1:{free_port()}"
    plain = mw.join("plain", 0, 1, store=store, timeout=SOON)
    os.environ.update(environ)
    me.emit("tried", **outcome(lambda: mw.join("w", 0, 1, store=me.store, timeout=SOON)))
    plain.close()


def test_one_process_has_no_worlds_of_both_modes(start, files):
    told = start(turns, environ=files()).expect("tried")
    assert "InvalidJoinError" in told.kinds, told
