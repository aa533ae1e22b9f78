"""torch's rendezvous: an etcd that is late, and rounds after the first one."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from multiworld.run.errors import ArgumentsError
from multiworld.run.nodes import handlers
from multiworld.run.nodes.handlers import etcd_handler, first_rendezvous, later_rendezvous


class Handler:
    """As that of torch 2.6: what it needs of the first round it keeps, and asserts in each later one."""

    def __init__(self, **kept):
        self.__dict__.update(kept)

    def next_rendezvous(self):
        return dict(self.__dict__)


@pytest.mark.parametrize(
    ("kept", "then"),
    [
        ({"_bootstrap_store_info": "of round 1", "_shared_tcp_store_server": None}, None),
        ({"_bootstrap_store_info": "of round 1", "_shared_tcp_store_server": "a server"}, "of round 1"),
    ],
)
def test_a_node_that_does_not_serve_the_workers_store_asks_for_its_address_anew(kept, then):
    assert later_rendezvous(Handler(**kept))["_bootstrap_store_info"] == then


class Silent(Handler):
    """Its round's first node was dropped, so many times, before it gave its address."""

    def next_rendezvous(self):
        self.rounds += 1
        if self.rounds <= self.dropped:
            raise DistStoreError("wait timeout after 60000ms, keys: /torch.rendezvous.r.0/MASTER_ADDR")
        return self.rounds


def test_a_node_meets_the_others_again_where_the_first_one_was_dropped():
    for dropped, rounds in ((0, 1), (1, 2), (2, 3)):
        notes = []
        assert first_rendezvous(Silent(rounds=0, dropped=dropped), notes.append) == rounds
        assert len(notes) == dropped
        assert all("MASTER_ADDR" in note for note in notes)
    with pytest.raises(DistStoreError, match="wait timeout"):
        first_rendezvous(Silent(rounds=0, dropped=3), notes.append)


def test_other_handlers_are_left_alone():
    assert later_rendezvous(Handler()) == {}


class EtcdException(Exception):
    """As python-etcd's."""


EtcdException.__module__ = "etcd"


def wrapped():
    """As torch's etcd-v2 has it."""
    error = RendezvousConnectionError("see inner exception")
    error.__cause__ = EtcdException("refused")
    return error


class Registry:
    """Raises the errors one after the other, then returns a handler; a second passes with each call."""

    def __init__(self, errors):
        self.errors, self.notes, self.now = iter(errors), [], 0.0

    def make(self, _):
        for error in self.errors:
            raise error
        return "handler"

    def sleep(self, seconds):
        self.now += seconds

    def run(self, monkeypatch, **conf):
        monkeypatch.setattr(handlers, "torch_handler", self.make)
        parameters = RendezvousParameters("etcd-v2", "host:2379", "run", 1, 2, **conf)
        note = lambda _, text: self.notes.append(text)  # noqa: E731
        return etcd_handler(parameters, note, clock=lambda: self.now, sleep=self.sleep)


def test_an_etcd_that_is_late_is_asked_again(monkeypatch):
    registry = Registry([wrapped(), EtcdException("refused"), wrapped()])
    assert registry.run(monkeypatch) == "handler"
    assert registry.notes == ["etcd at host:2379 does not answer: refused. It is asked again for 60 s"]


@pytest.mark.parametrize(("conf", "seconds"), [({}, 60), ({"read_timeout": "7"}, 7)])
def test_an_etcd_that_never_answers_is_named(monkeypatch, conf, seconds):
    registry = Registry(wrapped() for _ in itertools.count())
    with pytest.raises(RendezvousConnectionError, match="etcd at host:2379 does not answer: refused"):
        registry.run(monkeypatch, **conf)
    assert seconds - 2 < registry.now <= seconds


def test_wrong_arguments_are_not_tried_again(monkeypatch):
    registry = Registry([ArgumentsError("a protocol", rule="It is http", next_step="Give it")])
    with pytest.raises(ArgumentsError):
        registry.run(monkeypatch)
    assert registry.notes == []
