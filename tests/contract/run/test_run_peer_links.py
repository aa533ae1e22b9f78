"""The links between two agents, in this process."""

from __future__ import annotations

import threading
import time

import pytest
from kits.meetkit import until

from multiworld.run.nodes.peer_links import PeerLinks, PeerSignal
from multiworld.run.nodes.slots import Membership, Node

PATIENCE = 60.0


@pytest.fixture
def agents():
    """Two that are not connected yet; `heard` is what each was told."""
    made = []
    for number in range(2):
        heard: list[PeerSignal] = []
        links = PeerLinks(PATIENCE, heard.append)
        links.heard, links.port = heard, links.listen("127.0.0.1").port
        links.node = Node(links.me, f"host{number}", "127.0.0.1", links.port, 1, 1, "", "")
        made.append(links)
    yield made
    for links in made:
        links.close(time.monotonic() + PATIENCE)


def connect(agents):
    membership = Membership(1, "ab" * 16, "", (), tuple(each.node for each in agents))
    for each in agents:
        each.update(membership)


def what(agent):
    return [(signal.what, signal.cause) for signal in agent.heard]


def test_a_node_that_ends_the_run_says_so(agents):
    connect(agents)
    until(lambda: all(each.alive() for each in agents))
    for each in agents:
        each.settle(time.monotonic() + PATIENCE)
    agents[0].fail()
    agents[0].close(time.monotonic() + PATIENCE)
    until(lambda: len(agents[1].heard) >= 2)
    assert what(agents[1]) == [("failed", ""), ("lost", "left")]


@pytest.mark.parametrize("waits", ["alive", "working"], ids=["before-the-first", "after-it"])
def test_a_node_that_ends_the_run_says_so_to_one_whose_link_is_not_made_yet(agents, monkeypatch, waits):
    ended, attach = threading.Event(), PeerLinks._attach

    def late(self, link, kind, *rest):
        if self is agents[1] and kind.startswith(waits):
            assert ended.wait(PATIENCE)
        attach(self, link, kind, *rest)

    monkeypatch.setattr(PeerLinks, "_attach", late)
    connect(agents)
    if waits == "working":
        until(lambda: all(each.alive() for each in agents))
    agents[0].fail()
    if waits == "alive":
        ended.set()
        agents[0].settle(time.monotonic() + PATIENCE)
    agents[0].close(time.monotonic() + PATIENCE)
    ended.set()
    until(lambda: len(agents[1].heard) >= 2)
    assert what(agents[1]) == [("failed", ""), ("lost", "left")]


def test_a_node_that_leaves_does_not_end_the_run(agents):
    connect(agents)
    until(lambda: all(each.alive() for each in agents))
    agents[0].close(time.monotonic() + PATIENCE)
    until(lambda: agents[1].heard)
    assert what(agents[1]) == [("lost", "left")]
