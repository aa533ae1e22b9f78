"""A store that is a list of addresses: the thread that looks after it, and the names of its hosts."""

from __future__ import annotations

import logging
import socket
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from torch.distributed import TCPStore

from multiworld._core.membership.roster import Endpoint
from multiworld._core.membership.serving import AddressState
from multiworld._net.stores import listed, looking
from multiworld._net.stores.address import StoreAddress
from multiworld._net.stores.store import open_store
from multiworld.errors import StoreUnreachableError


def test_the_thread_goes_on_after_any_error(monkeypatch, caplog):
    """No descriptor, or thread, may be left for a while: what it does not do then, it does afterwards."""
    monkeypatch.setattr(listed, "_KEEP_EVERY", 0.001)
    server = listed.ListedServer("list", ())
    turns, enough = [], threading.Event()

    def once():
        turns.append(None)
        if len(turns) < 4:
            raise (
                RuntimeError("can't start new thread")
                if len(turns) < 3
                else OSError(24, "Too many open files")
            )
        enough.set()

    monkeypatch.setattr(server, "_keep_once", once)
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=server._keep, daemon=True)
        thread.start()
        assert enough.wait(10)
        server._ended.set()
        thread.join(10)
    assert not thread.is_alive()
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2, "each kind once"
    assert "can't start new thread" in said[0]
    assert "Too many open files" in said[1]


class Closed:
    """A client, or a server, and whether it was closed."""

    def __init__(self):
        self.closed = threading.Event()

    def alive(self, **_):
        return True

    def close(self):
        self.closed.set()


def test_a_look_that_is_under_way_does_not_hold_up_the_end(monkeypatch):
    """Stopped processes at its addresses have seconds each; what looks at them ends the server afterwards."""
    it = listed.ListedServer("list", ())
    it.client, it.server = client, server = Closed(), Closed()
    it._now = (client, it.found)
    looks, goes_on = threading.Event(), threading.Event()

    def look_aside(*_, **__):
        looks.set()
        assert goes_on.wait(60)
        return []

    monkeypatch.setattr(it._addresses, "look_aside", look_aside)
    thread = threading.Thread(target=it._keep, daemon=True)
    thread.start()
    assert looks.wait(10)
    began = time.monotonic()
    it.close()
    assert time.monotonic() - began < 5
    assert not server.closed.is_set()
    goes_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert client.closed.is_set()
    assert server.closed.is_set()
    assert (it.client, it.server, it._now) == (None, None, None)


def test_the_name_of_a_silent_host_is_resolved_anew(monkeypatch):
    """As of a pod that was replaced: its name leads to another address."""
    now, leads_to, asked = [100.0], ["10.0.0.1"], []

    def resolved(address, **_):
        asked.append(now[0])
        return [(socket.AF_INET, (leads_to[0], address.port))]

    def answers(endpoints, _within):
        return {each: False if each == Endpoint("10.0.0.2", 29500) else None for each in endpoints}

    monkeypatch.setattr(looking, "resolved_targets", resolved)
    monkeypatch.setattr(looking, "answers", answers)
    monkeypatch.setattr(looking, "time", SimpleNamespace(monotonic=lambda: now[0]))
    addresses = looking.Addresses((StoreAddress("tcp", "pod", 29500),))
    for _ in range(3):
        assert addresses.look()[0][0].look is AddressState.SILENT
        now[0] += 1.0
    leads_to[0] = "10.0.0.2"
    assert asked == [100.0]
    now[0] += 2.5
    assert addresses.look()[0][0].look is AddressState.FREE
    for _ in range(3):
        now[0] += 60.0
        addresses.look()
    assert asked == [100.0, 105.5], "it answers: nothing is asked"


def test_a_name_that_does_not_resolve_is_asked_for_four_times_a_second(monkeypatch):
    now, asked = [100.0], []

    def unresolved(address, **_):
        asked.append(address.host)
        raise StoreUnreachableError("", address.host)

    monkeypatch.setattr(looking, "resolved_targets", unresolved)
    monkeypatch.setattr(looking, "time", SimpleNamespace(monotonic=lambda: now[0]))
    addresses = looking.Addresses((StoreAddress("tcp", "pod", 29500),))
    for _ in range(10):
        assert addresses.look()[0][0].look is AddressState.SILENT
        assert not addresses.is_own(0)
        now[0] += 0.05
    assert asked == ["pod", "pod"]


class Store:
    """Client of a store at the only address; it says this of itself."""

    def __init__(self):
        self.state = b""

    def get(self, key, **_):
        return self.state if key == looking.STATE else None

    def close(self): ...


def test_a_store_that_never_says_what_it_is_is_no_candidate(monkeypatch):
    now, store, accepts = [100.0], Store(), [True]
    monkeypatch.setattr(looking, "answers", lambda endpoints, _: dict.fromkeys(endpoints, accepts[0]))
    monkeypatch.setattr(looking, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(looking, "TcpClient", SimpleNamespace(connect_as=lambda *_, **__: store))
    addresses = looking.Addresses((StoreAddress("tcp", "127.0.0.1", 29500),))

    def look(seconds=0.0):
        now[0] += seconds
        return addresses.look()[0][0].look

    assert (look(), look(1.0)) == (AddressState.CANDIDATE, AddressState.CANDIDATE), (
        "one may just have bound its address"
    )
    store.state = b"candidate"
    assert look(60.0) is AddressState.CANDIDATE
    store.state = b""
    assert (look(60.0), look(60.0), look(0.1)) == (
        AddressState.CANDIDATE,
        AddressState.FOREIGN,
        AddressState.FOREIGN,
    )
    assert "ordinary store" in addresses.told(addresses.look()[0])
    accepts[0] = False
    assert look(1.0) is AddressState.FREE
    accepts[0] = True
    assert look(1.0) is AddressState.CANDIDATE
    store.state = b"open 0 x"
    assert look(60.0) is AddressState.OPEN


def test_an_ordinary_store_at_an_address_keeps_none_from_serving_at_the_next(monkeypatch):
    monkeypatch.setattr(looking, "ORDINARY", 0.2, raising=False)
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    store = open_store(
        f"tcp://127.0.0.1:{other.port},{where}", world="w", serve=True, deadline=time.monotonic() + 20
    )
    store.store.set("a", "b")
    assert not other.check(["a"])
    assert store.serves
    store.close()
