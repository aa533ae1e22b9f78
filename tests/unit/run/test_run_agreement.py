"""How nodes agree on a membership in a store that still has the notes of an earlier run."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from multiworld.run.nodes.agreement import Agreement
from multiworld.run.nodes.rendezvous_store import RendezvousStore, StoreSilentError
from multiworld.run.nodes.slots import Node, NodeRecord

PATIENCE = 60.0


def agreement(kept, rank, run, **options):
    """One of the two nodes of a run, with a client of its own."""
    node = Node(f"{run}{rank}", "host", "127.0.0.1", 1, 1, capacity=1, role="r", store="tcp://127.0.0.1:1")
    store = RendezvousStore(dist.PrefixStore("torch.rendezvous.fleet.0", kept), patience=PATIENCE)
    return Agreement(store, rank, 2, NodeRecord(node), after=0, counts=None, token=run, **options)


def agreed(each, asked=lambda: None):
    def cancelled():
        asked()
        return False

    return each.membership(time.monotonic() + PATIENCE, cancelled)[1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_takes_no_membership_of_an_earlier_one_for_its_own(first):
    """torch begins with round 0 again when its state has expired; either node may be the first to look."""
    kept = dist.HashStore()
    looks, looked = iter(range(3)), threading.Event()

    def asked():
        if next(looks, None) is None:  # it has looked at the store, and goes on
            looked.set()

    with ThreadPoolExecutor(2) as nodes:
        before = [nodes.submit(agreed, agreement(kept, rank, "old")) for rank in (0, 1)]
        assert {each.result() for each in before} == {before[0].result()}
        one = nodes.submit(agreed, agreement(kept, first, "new"), looked.set if first == 0 else asked)
        assert looked.wait(PATIENCE)
        other = nodes.submit(agreed, agreement(kept, 1 - first, "new"))
        assert one.result() == other.result()
    assert [node.id for node in one.result().nodes] == ["new0", "new1"]


def test_a_node_that_comes_back_to_a_static_rendezvous_finds_the_membership_there_is():
    """Its store has one agreement for all rounds: the first node does not form another one."""
    kept = dist.HashStore()
    with ThreadPoolExecutor(2) as nodes:
        before = [nodes.submit(agreed, agreement(kept, rank, "run", once=True)) for rank in (0, 1)]
        assert [each.result().epoch for each in before] == [1, 1]
        assert agreed(agreement(kept, 0, "run", once=True)) == before[0].result()


def test_a_call_that_was_given_up_is_waited_for_at_the_end():
    """It comes back from C++ when the host of the store ends: then the interpreter has to be there."""
    answers, store = threading.Event(), dist.HashStore()

    class Silent:
        def check(self, keys):
            assert answers.wait(PATIENCE)
            return store.check(keys)

    asked = RendezvousStore(Silent(), patience=0.05)
    assert asked.settle(0.0)
    with pytest.raises(StoreSilentError):
        asked.follow()
    assert not asked.settle(0.05)
    answers.set()
    assert asked.settle(PATIENCE)


def test_a_call_for_which_the_host_has_no_thread_is_none_that_hangs(monkeypatch):
    """The store was not asked: the next call asks it."""
    asked = RendezvousStore(dist.HashStore(), patience=PATIENCE)
    asked.begin()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StoreSilentError, match="can't start new thread") as caught:
            asked.read("note")
    assert not caught.value.gone
    assert asked.settle(0.0)
    asked.write("note", {"a": 1})
    assert asked.read("note") == {"a": 1}
