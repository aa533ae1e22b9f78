"""Members on several hosts: at which address each is reached. The hosts are network namespaces."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kits.contract.worldkit import SOON, enter_netns
from kits.netkit import Network, ip

import multiworld as mw
from multiworld._net import host_address


@pytest.fixture
def network():
    with Network(3) as made:
        yield made


def store_of(kind, rank, path, port, name):
    if kind == "file":
        return f"file://{path}"
    if kind == "FileStore":
        return dist.FileStore(path)
    if kind == "TCPStore":  # whose master listens on every interface, and calls itself so
        wait = timedelta(seconds=SOON)
        host = "localhost" if rank == 0 else "10.79.0.1"
        return dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=wait)
    return f"tcp://{name}:{port}"


def known_as(name, here):
    """Have the host's own name in its /etc/hosts as Debian has it: 127.0.1.1; the others resolve it rightly."""
    original = socket.getaddrinfo

    def getaddrinfo(host, *rest, **more):
        return original(here if host == name else host, *rest, **more)

    socket.getaddrinfo = getaddrinfo


def member(me, netns, size, kind, path, environ):
    enter_netns(netns)
    os.environ.update(environ)
    socket.gethostname = lambda: f"host{me.rank}"  # what the namespaces share
    known_as("m8d-first", "127.0.1.1" if me.rank == 0 else "10.79.0.1")
    if kind == "TCPStore" and me.rank:
        me.hear()
    store = store_of(kind, me.rank, path, 29500, "m8d-first")
    me.emit("store")
    try:
        w = mw.join("w1", me.rank, size, store=store, timeout=2 * SOON)
    except mw.JoinError as error:
        me.emit("refused", kind=type(error).__name__, text=str(error))
        return
    t = torch.ones(1)
    w.all_reduce(t)
    assert w.group is not None  # gloo reaches the others as well
    me.emit("joined", value=t.item(), hosts=[each.endpoint.host for each in w.members])
    me.hear()
    w.close()


def play(cast, network, tmp_path, kind, size, environ=()):
    environ = dict(environ)
    members = [
        cast.start(
            member, rank, netns=network.hosts[rank], size=size, kind=kind,
            path=str(tmp_path / "store"), environ=environ.get(rank, {}),
        )
        for rank in range(size)
    ]  # fmt: skip
    if kind == "TCPStore":
        members[0].expect("store")
        for each in members[1:]:
            each.say("it is served")
    return members


def all_join(members, network):
    size = len(members)
    for each in members:
        seen = each.expect("joined")
        assert seen.value == size
        assert seen.hosts == [network.address(number) for number in range(1, size + 1)]
    for each in members:
        each.say("close")
    assert [each.finish() for each in members] == [0] * size


@pytest.mark.parametrize("kind", ["file", "FileStore", "TCPStore", "name"])
def test_stores_that_do_not_say_where_this_host_is(cast, network, tmp_path, kind):
    all_join(play(cast, network, tmp_path, kind, 2), network)


def test_three_hosts(cast, network, tmp_path):
    all_join(play(cast, network, tmp_path, "file", 3), network)


@pytest.mark.parametrize(
    "environ",
    [{"M8D_HOST": "10.79.0.1"}, {"M8D_IFNAME": "none,m8d0"}, {"GLOO_SOCKET_IFNAME": "m8d0"}],
)
def test_addresses_and_interfaces_by_name(cast, network, tmp_path, environ):
    # Another interface would be taken, were none named.
    for number, host in enumerate(network.hosts[:2], 1):
        ip("-n", host, "link", "add", "a0", "type", "veth", "peer", "name", "a1")
        ip("-n", host, "address", "add", f"10.99.0.{number}/32", "dev", "a0")
        for device in ("a1", "a0"):
            ip("-n", host, "link", "set", device, "up")
        ip("-n", host, "route", "add", "default", "dev", "a0")
    mine = {0: environ, 1: environ | ({"M8D_HOST": "10.79.0.2"} if "M8D_HOST" in environ else {})}
    all_join(play(cast, network, tmp_path, "file", 2, mine), network)


@pytest.mark.parametrize("own", ["127.0.0.1", "10.99.0.1"])
def test_addresses_that_the_others_do_not_reach_are_named(cast, network, tmp_path, own):
    """Each host has this one for itself: loopback, or a bridge of containers."""
    if own != "127.0.0.1":
        for host in network.hosts[:2]:
            ip("-n", host, "address", "add", f"{own}/32", "dev", "lo")
    members = play(cast, network, tmp_path, "file", 2, {rank: {"M8D_HOST": own} for rank in range(2)})
    for each in members:
        seen = each.expect("refused", timeout=SOON)
        assert seen.kind == "MismatchError", seen
        assert seen.text.count(own) == 2
        for part in ("host0", "host1", "M8D_HOST"):
            assert part in seen.text, seen.text
    assert [each.finish() for each in members] == [0, 0]


@pytest.mark.parametrize(("name", "value"), [("M8D_HOST", "192.0.2.7"), ("M8D_IFNAME", "none0")])
def test_what_is_no_address_of_this_host(monkeypatch, tmp_path, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(mw.InvalidJoinError, match=f"{name}='{value}'"):
        mw.join("w1", 0, 1, store=f"file://{tmp_path}/store", timeout=SOON)


def test_interfaces_of_this_host(monkeypatch):
    assert host_address._of_interface("lo") == "127.0.0.1"
    assert host_address._of_interface("none0") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert host_address.chosen("w") == "127.0.0.1"
    monkeypatch.setenv("M8D_HOST", "localhost")
    assert host_address.chosen("w") in {"127.0.0.1", "::1"}
