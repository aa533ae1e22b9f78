"""The addresses of a store's host: each is tried in its turn."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from multiworld._net.stores import store
from multiworld._net.stores.address import StoreAddress


class Hosts:
    """Silent ones, but for those that answer within some seconds. Time passes with them, and with `serving`."""

    def __init__(self, monkeypatch, *, answers=None, serving=0.0):
        self.answers, self.serving, self.now, self.given = answers or {}, serving, 100.0, []
        monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(store.TcpClient, "connect_as", self.connect_as)
        monkeypatch.setattr(store._Attempt, "_bind_error", self.bind_error)

    def bind_error(self, _):
        self.now += self.serving
        return OSError(98, "Address already in use")

    def connect_as(self, _, __, target, *, deadline):
        self.given.append(round(deadline - self.now, 3))
        takes = self.answers.get(target[0], 1e9)
        self.now += min(takes, max(0.0, deadline - self.now))
        if deadline <= self.now:
            raise TimeoutError("timed out")
        return "a client"


def attempt(*hosts, serve=False):
    made = store._Attempt(
        StoreAddress("tcp", "node.example", 29511),
        world="w",
        serve=serve,
        only=True,
        known=False,
        credentials=None,
    )
    made.targets = [(int(socket.AF_INET), (host, 29511)) for host in hosts]
    return made


def test_an_address_after_a_silent_one_is_tried_in_the_same_attempt(monkeypatch):
    hosts = Hosts(monkeypatch, answers={"10.0.0.2": 0.1})
    shared = attempt("10.0.0.1", "10.0.0.2").make(200.0)
    assert shared is not None
    assert shared.client == "a client"
    assert hosts.given == [1.8, 0.2]


@pytest.mark.parametrize("slow", [0, 1])
def test_each_has_most_of_an_attempt_by_turns(monkeypatch, slow):
    """One that answers late, as a busy one does, is found beside a silent one."""
    hosts = Hosts(monkeypatch, answers={"ab"[slow]: 1.5})
    trying = attempt(*"ab")
    assert [trying.make(200.0) is not None for _ in range(slow + 1)] == [False] * slow + [True]
    assert hosts.given == ([1.8, 0.2, 1.8] if slow else [1.8])


@pytest.mark.parametrize(("left", "given"), [(100.0, [1.4, 0.2, 0.2, 0.2]), (0.4, [0.1] * 4)])
def test_all_of_them_have_one_attempt_together(monkeypatch, left, given):
    hosts = Hosts(monkeypatch)
    assert attempt(*"abcd").make(100.0 + left) is None
    assert hosts.given == given


def test_what_serving_took_is_not_missing_from_the_attempt(monkeypatch):
    hosts = Hosts(monkeypatch, answers={"10.0.0.1": 0.5}, serving=3.0)
    assert attempt("10.0.0.1", serve=True).make(200.0) is not None
    assert hosts.given == [2.0]
