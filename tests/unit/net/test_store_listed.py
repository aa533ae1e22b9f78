"""A store that is a list of addresses: the thread that looks after it, and the names of its hosts."""

from __future__ import annotations

import logging
import socket
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from multiworld._core.membership.roster import Endpoint
from multiworld._core.membership.serving import Look
from multiworld._net.stores import listed, looking
from multiworld._net.stores.address import StoreAddress


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
        assert addresses.look()[0][0].look is Look.SILENT
        now[0] += 1.0
    leads_to[0] = "10.0.0.2"
    assert asked == [100.0]
    now[0] += 2.5
    assert addresses.look()[0][0].look is Look.FREE
    for _ in range(3):
        now[0] += 60.0
        addresses.look()
    assert asked == [100.0, 105.5], "it answers: nothing is asked"
