"""The connections that NCCL's worlds get for themselves: used again when their world is gone, never by two at once."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from kits.contract.worldkit import free_port

from multiworld._net.stores import shared as stores
from multiworld._net.stores.store import open_store


def opened(address, name="w"):
    return open_store(address, world=name, serve=True, deadline=time.monotonic() + 30)


@pytest.fixture(autouse=True)
def _as_with_an_older_torch(monkeypatch):
    monkeypatch.setattr(stores, "_made_without_gil", lambda: True)


@pytest.fixture
def address(tmp_path):
    """Of a server that this test serves itself; the port is the kernel's."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    yield f"tcp://127.0.0.1:{server.port}", server
    del server


def test_a_connection_that_is_idle_is_used_again_and_no_other(address):
    where, _server = address
    beside, first = opened(where, "beside"), opened(where)
    used, unused = first.fresh(), beside.fresh()
    assert used is not unused
    first.idle()
    first.close()
    second = opened(where)
    again, another = second.fresh(), second.fresh()
    assert again is used
    assert another not in (used, unused)
    another.set("key", "value")
    assert again.get("key") == b"value"
    second.idle()
    second.idle()  # once is enough
    third = opened(where)
    assert {id(third.fresh()) for _ in range(2)} == {id(again), id(another)}
    for each in (third, second, beside):
        each.close()


def test_what_is_not_said_to_be_idle_is_given_to_nobody(address):
    where, _server = address
    beside, first = opened(where, "beside"), opened(where)
    used = first.fresh()
    first.close()
    assert beside.fresh() is not used
    beside.close()


def test_a_torch_that_makes_stores_safely_gets_new_ones(address, monkeypatch):
    monkeypatch.setattr(stores, "_made_without_gil", lambda: False)
    where, _server = address
    beside, first = opened(where, "beside"), opened(where)
    used = first.fresh()
    first.idle()
    assert beside.fresh() is not used
    for each in (first, beside):
        each.close()


def test_a_connection_whose_server_is_gone_is_thrown_away():
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port = server.port
    where = f"tcp://127.0.0.1:{port}"
    beside, first = opened(where, "beside"), opened(where)
    used = first.fresh()
    first.idle()
    del server
    successor = dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    again = beside.fresh()
    assert again is not used
    again.set("key", "value")
    assert successor.get("key") == b"value"
    for each in (first, beside):
        each.close()


@pytest.mark.parametrize("serve", [True, False])
def test_a_server_that_was_slow_once_ends_with_the_last_hold(serve):
    """Its process finds its own client without an answer, and connects again."""
    where = {"store": f"tcp://127.0.0.1:{free_port()}", "world": "w"}
    first = open_store(**where, serve=True, deadline=time.monotonic() + 30)
    first._shared.client.close()
    second = open_store(**where, serve=serve, deadline=time.monotonic() + 30)
    assert second.serves
    first.close()
    second.store.set("a", "b")
    assert second.store.get("a") == b"b"
    second.close()
