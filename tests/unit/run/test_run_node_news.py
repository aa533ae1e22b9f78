"""What a launcher says of the other nodes, and of seats that no node has."""

from __future__ import annotations

import pytest
from test_run_seats import formed

from multiworld.run.errors import RunError
from multiworld.run.events import NodeLost
from multiworld.run.nodes import rank_assignment
from multiworld.run.nodes.interface import Lost, Stop
from multiworld.run.nodes.node_news import NodeNews
from multiworld.run.worldsfile.worlds_plan import LAUNCHER, PlannedMember, PlannedWorld, Role, WorldsPlan

TWO = formed("a", "b", capacity=2)


def world(name, *indices):
    members = tuple(PlannedMember("worker", index) for index in indices)
    return PlannedWorld(name, members, "gloo", LAUNCHER, None, None, None, (), 1)


PLAN = WorldsPlan((Role("worker", 4, 1),), (world("w", 0, 2),), "w.toml")


def news(plan=None, on_loss="continue", most=2):
    return NodeNews(plan, on_loss, most)


def test_a_lost_node():
    run, agent = news().lost(TWO, TWO.node("b"), "hung", 5.0)
    assert run == NodeLost(5.0, "host-b", 1, "hung", ())
    assert agent == Lost("host-b", 1, "hung", (2, 3), ())
    run, agent = news(PLAN).lost(TWO, TWO.node("b"), "left", 5.0)
    assert (run.worlds, agent.worlds) == (("w",), ("w",))


def test_a_lost_spare_has_no_ranks():
    three = formed("a", "b", "c", total=2)
    run, agent = news().lost(three, three.node("c"), "crashed", 5.0)
    assert (run.slot, agent.slot, agent.ranks) == (None, None, ())


def test_ranks_without_a_node_are_told_once():
    after = rank_assignment.leave(TWO, {"b"})
    goes_on = "; the rest goes on, and a node that comes gets the place"
    assert news().vacant(None, TWO) == news().vacant(TWO, TWO) == ""
    assert news().vacant(TWO, after) == f"no node for ranks 2, 3{goes_on}"
    assert news().vacant(None, after) == f"no node for ranks 2, 3{goes_on}"
    assert news().vacant(after, after) == ""
    assert news(PLAN).vacant(TWO, after) == f"no node for ranks 2, 3: world w cannot be whole{goes_on}"
    small = formed("a", "b")
    assert news().vacant(small, rank_assignment.leave(small, {"b"})) == f"no node for rank 1{goes_on}"


def test_they_end_the_run_where_that_is_asked_for_but_not_at_its_beginning():
    after = rank_assignment.leave(TWO, {"b"})
    assert news(on_loss="stop").vacant(TWO, after) == Stop("no node for ranks 2, 3")
    assert isinstance(news(on_loss="stop").vacant(None, after), str)


def test_several_worlds_cannot_be_whole():
    plan = WorldsPlan(PLAN.roles, (*PLAN.worlds, world("x", 1, 3)), "w.toml")
    assert ": worlds w, x cannot" in news(plan).vacant(TWO, rank_assignment.leave(TWO, {"b"}))


def test_the_first_nodes_have_room_or_others_may_come():
    assert news().room(TWO) == news(PLAN).room(TWO) == ""
    small = formed("a", "b", total=4)
    assert news().room(small) == ""
    said = "4 workers of w.toml, and the nodes have room for 2 (host-a: 1, host-b: 1)"
    assert news(PLAN, most=3).room(small) == f"{said}: ranks 2 to 3 start when another node comes"
    for most in (1, 2):
        with pytest.raises(RunError, match=r"room for 2 \(host-a: 1, host-b: 1\)"):
            news(PLAN, most=most).room(small)
    assert news(PLAN).room(rank_assignment.leave(small, ())) == "", "only the first membership"
