"""The thread in which a node watches the others, in this process: one node, and a rendezvous of its own."""

from __future__ import annotations

import types

import pytest
import torch.distributed as dist
from kits.meetkit import until

from multiworld.run.events import EventBus
from multiworld.run.nodes.interface import NodesSpec, Stop
from multiworld.run.nodes.multi import MultiNode
from multiworld.run.nodes.peer_links import PeerLinks

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
def nodes():
    made = MultiNode(SPEC, Handler(), EventBus(), None)
    made.settle(
        types.SimpleNamespace(store=dist.HashStore(), rank=0, world_size=1, bootstrap_store_info=None)
    )
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
