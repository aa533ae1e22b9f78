"""The thread in which a node watches the others, in this process: one node, and a rendezvous of its own."""

from __future__ import annotations

import time
import types

import pytest
import torch.distributed as dist
from kits.meetkit import until

from multiworld.run.events import EventBus, NodeJoined
from multiworld.run.nodes import slots
from multiworld.run.nodes.interface import NodesSpec, Over, Reassigned, Stop
from multiworld.run.nodes.multi import MultiNode
from multiworld.run.nodes.peer_links import PeerLinks, PeerSignal
from multiworld.run.nodes.rendezvous_store import RendezvousStore, StoreSilentError

SPEC = NodesSpec(
    run_id="watch", endpoint="127.0.0.1:1", local_addr="127.0.0.1", min_nodes=1, max_nodes=2, capacity=1,
    hang_timeout=60.0,
)  # fmt: skip


class Handler:
    """A rendezvous handler of one node for which none waits."""

    def get_backend(self):
        return "c10d"

    def num_nodes_waiting(self):
        return 0


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def bus():
    return EventBus()


@pytest.fixture
def nodes(store, bus):
    made = MultiNode(SPEC, Handler(), bus, None)
    made.settle(types.SimpleNamespace(store=store, rank=0, world_size=1, bootstrap_store_info=None))
    yield made
    made.close()


def ends(nodes):
    """Wait for an event that ends the run; return it."""
    events = []
    until(lambda: events.extend(nodes.poll()) or events)
    return events[0]


@pytest.mark.parametrize("item", ["done", "turn"])
def test_an_error_in_the_watch_ends_the_run(nodes, monkeypatch, item):
    def fails(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(*{"done": (PeerLinks, "done"), "turn": (MultiNode, "_poll_store")}[item], fails)
    nodes.done()
    event = ends(nodes)
    assert isinstance(event, Stop)
    assert "can't start new thread" in event.reason


@pytest.fixture
def joined(bus, nodes, monkeypatch):
    """Return the hosts of the nodes that were admitted; there are no processes behind them to be linked with."""
    monkeypatch.setattr(PeerLinks, "update", lambda *_: None)
    hosts = []
    bus.subscribe(lambda event: hosts.append(event.node) if isinstance(event, NodeJoined) else None)

    def look():
        nodes.poll()
        return hosts

    return look


def apply(store, number, host):
    node = slots.Node(
        id=f"{number:032x}", host=host, address="127.0.0.1", port=1, pid=1, capacity=1, role="", store=""
    )
    RendezvousStore(store).write(f"apply/{number}", slots.to_json(slots.NodeRecord(node)))


def test_a_node_whose_application_is_late_is_admitted(store, joined):
    apply(store, 2, "quick")
    until(lambda: joined() == ["quick"])
    apply(store, 1, "slow")
    until(lambda: joined() == ["quick", "slow"])


def test_a_node_is_admitted_after_the_store_was_silent_at_its_admission(store, joined, monkeypatch):
    add, calls = RendezvousStore.add, []

    def silent_once(self, *args):
        calls.append(args)
        if len(calls) == 1:
            raise StoreSilentError("asleep")
        return add(self, *args)

    monkeypatch.setattr(RendezvousStore, "add", silent_once)
    apply(store, 1, "quick")
    until(lambda: joined() == ["quick"])
    assert len(calls) == 2


def lose(nodes, number, epoch, cause="unreachable"):
    """Tell the watch that the link of that epoch with a node ended just now; see `apply` for its number."""
    nodes._inbox.put(PeerSignal(f"{number:032x}", epoch, "lost", cause, time.monotonic()))


@pytest.mark.parametrize("before", ["store", "rendezvous"])
def test_a_node_cut_off_after_the_store_was_lost_for_good_ends(store, nodes, joined, monkeypatch, before):
    apply(store, 1, "other")
    until(lambda: joined() == ["other"])

    def gone(*_):
        raise StoreSilentError("Broken pipe", gone=before == "store")

    monkeypatch.setattr(RendezvousStore, "newest", gone)
    if before == "rendezvous":
        nodes._inbox.put("gone")
    lose(nodes, 1, 2)
    events = []
    until(lambda: events.extend(nodes.poll()) or any(isinstance(each, Stop) for each in events))
    lost = next(each for each in events if isinstance(each, Reassigned))
    assert lost.assignment.slot is None
    assert "the rendezvous store is gone: it cannot get one" in events[-1].reason


def test_a_node_cut_off_after_the_others_have_closed_the_rendezvous_is_done(
    store, nodes, joined, monkeypatch
):
    apply(store, 1, "other")
    until(lambda: joined() == ["other"])

    def silent(*_):
        raise StoreSilentError("asleep")

    monkeypatch.setattr(RendezvousStore, "newest", silent)
    nodes._inbox.put("closed")
    lose(nodes, 1, 2)
    events = []
    until(lambda: events.extend(nodes.poll()) or Over() in events)
