"""Worlds that meet at every kind of store: values, a crash, and the next generation."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kits.contract.worldkit import free_port, outcome

import multiworld as mw


def store_of(me, kind, where):
    if kind == "object TCPStore":
        host, port = where
        return dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
    if kind == "object PrefixStore":
        return dist.PrefixStore("mine", store_of(me, "object TCPStore", where))
    if kind == "object FileStore":
        return dist.FileStore(where, -1)
    return where


def lives(me, size, kind, where):
    """Joins, and again after each breakage, until told that it was enough."""
    w = mw.join("w1", me.rank, size, store=store_of(me, kind, where), timeout=60)
    while True:
        t = torch.tensor([float(w.rank)])
        w.all_reduce(t)
        assert t.item() == sum(range(size))
        me.emit("active", generation=w.generation, hosts=[each.endpoint.host for each in w.members])
        if me.hear() == "close":
            break
        me.emit("raised", **outcome(lambda: w.recv(torch.ones(1), size - 1)))
        w.rejoin()
    w.close()


def has_ipv6():
    try:
        free_port("::1")
    except OSError:
        return False
    return True


def place(cast, kind, tmp_path):
    if kind == "tcp name":
        return f"tcp://localhost:{free_port()}"
    if kind == "tcp IPv6":
        if not has_ipv6():
            pytest.skip("there is no IPv6 loopback here")
        return f"tcp://[::1]:{free_port('::1')}"
    if kind == "tcp own name":
        name = socket.gethostname()
        try:
            return f"tcp://{name}:{free_port(socket.gethostbyname(name))}"
        except OSError:
            pytest.skip(f"the name of this host, {name!r}, leads nowhere")
    if kind == "file":
        return f"file://{tmp_path}/store"
    if kind == "object FileStore":
        return str(tmp_path / "store")
    return ("127.0.0.1", cast.server.port)


@pytest.mark.parametrize(
    "kind",
    [
        "tcp name",
        "tcp IPv6",
        "tcp own name",
        "file",
        "object TCPStore",
        "object PrefixStore",
        "object FileStore",
    ],
)
def test_a_world_lives_and_is_joined_again_at_every_kind_of_store(cast, kind, tmp_path):
    size, where = 3, place(cast, kind, tmp_path)
    members = [cast.start(lives, rank, size=size, kind=kind, where=where) for rank in range(size - 1)]
    for generation in (1, 2):
        last = cast.start(lives, size - 1, size=size, kind=kind, where=where)
        seen = [member.expect("active", timeout=60) for member in (*members, last)]
        assert {each.generation for each in seen} == {generation}
        hosts = {host for each in seen for host in each.hosts}
        if kind == "tcp IPv6":
            assert hosts == {"::1"}
        elif kind == "tcp name":
            assert hosts == {"127.0.0.1"}  # a loopback store: nobody else can reach the watchdogs
        elif kind != "tcp own name":
            assert (
                len(hosts) == 1
            )  # a store that says nothing of hosts: the interface that leads outward, if any
        if generation == 2:
            break
        for member in members:
            member.say("wait")
        last.kill()
        for member in members:
            raised = member.expect("raised")
            assert (raised.cause, raised.ranks) == ("crashed", (size - 1,)), raised
    for member in (*members, last):
        member.say("close")
    assert [member.finish() for member in (*members, last)] == [0] * size


def alone(me):
    store = dist.HashStore()
    w = mw.join("w1", 0, 1, store=store, timeout=60)
    v = mw.join("w2", 0, 1, store=store, timeout=60)
    for each in (w, v):
        t = torch.ones(2)
        each.all_reduce(t)
        assert t.tolist() == [1.0, 1.0]
    w.close()
    w.rejoin()
    me.emit("active", generations=(w.generation, v.generation))
    w.close()
    v.close()


def test_a_store_in_memory_is_enough_for_a_world_of_one(cast):
    only = cast.start(alone)
    assert only.expect("active").generations == (2, 1)
    assert only.finish() == 0
