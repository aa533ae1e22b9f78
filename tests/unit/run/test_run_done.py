"""What a launcher knows of nodes whose workers have ended with 0."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from multiworld.run.events import EventBus
from multiworld.run.nodes.interface import NodesSpec, Over
from multiworld.run.nodes.multi import MultiNode
from multiworld.run.nodes.slots import Membership, Node, Slot


@pytest.fixture
def launcher():
    spec = NodesSpec(run_id="r", endpoint="h:1", local_addr=None, min_nodes=1, max_nodes=3, capacity=1)
    made = MultiNode(spec, SimpleNamespace(get_backend=lambda: "c10d"), EventBus(), None)
    with contextlib.closing(made):
        yield made


def membership(launcher, epoch, holder, done=()):
    """Of this node alone, and a seat beside its own."""
    mine = launcher._links.me
    node = Node(mine, "h", "127.0.0.1", 1, 1, 1, "", "tcp://h:1", 1)
    return Membership(epoch, "00", mine, (Slot(1, "", mine), Slot(1, "", holder)), (node,), done)


@pytest.mark.parametrize("holder", ["y", None])
def test_a_node_whose_seat_was_given_away_is_done_no_more(launcher, holder):
    """The node that decided did not know of it, and the ranks run again: also on that node, if it comes back."""
    launcher._apply(membership(launcher, 1, "x", done=("x",)))
    assert launcher._standing.finished == {"x"}
    launcher._apply(membership(launcher, 2, "x"))  # of a launcher of an earlier version
    assert launcher._standing.finished == {"x"}
    launcher._apply(membership(launcher, 3, holder))
    assert launcher._standing.finished == set()


def told(launcher):
    launcher._check_over(launcher._standing.membership)
    return [each for each in launcher.poll() if isinstance(each, Over)]


@pytest.mark.parametrize("rendezvous", ["", "gone"], ids=["others may come", "none can come"])
def test_a_node_without_workers_that_is_left_alone(launcher, rendezvous):
    launcher._apply(membership(launcher, 1, None))
    launcher._no_rendezvous = rendezvous
    assert told(launcher) == [], "its workers run"
    launcher._take_in("idle")
    assert told(launcher) == ([Over((1,))] if rendezvous else [])
    assert told(launcher) == [], "once"
    assert not launcher._standing.done


def test_a_node_without_workers_is_done_once_the_others_are_and_says_so(launcher, monkeypatch):
    said = []
    monkeypatch.setattr(launcher._links, "done", lambda: said.append("done"))
    launcher._apply(membership(launcher, 1, "x"))
    launcher._take_in("idle")
    assert launcher._says()["idle"]
    assert (told(launcher), said) == ([], [])
    launcher._take_in("not idle")
    launcher._standing.finished.add("x")
    assert not launcher._says()["idle"]
    assert (told(launcher), said) == ([], []), "its workers run again"
    launcher._take_in("idle")
    assert (told(launcher), said) == ([Over()], ["done"])
    assert launcher._standing.done
