"""Which other nodes have no workers: asked for only when the run is over with them."""

from __future__ import annotations

import time

from test_run_seats import formed
from test_run_standing import standing

from multiworld.run.nodes.idle_nodes import IDLE, IdleNodes

THREE = formed("a", "b", "c")


class Others:
    """What the other launchers say of themselves; asked for with time that goes on as it is told to."""

    def __init__(self):
        self.idle, self.asked, self.now = {"b": False, "c": False}, 0, 0.0
        self.nodes = IdleNodes(self._told)

    def _told(self, _timeout):
        self.asked += 1
        return [{"meets": {"node": node, IDLE: idle}} for node, idle in self.idle.items()]

    def found(self, of, lost=()):
        """What the answers to one more question come to, or what is found without one."""
        asked, self.now = self.asked, self.now + 10.0
        found = self.nodes.others(of, THREE, lost, self.now)
        until = time.monotonic() + 60
        while self.nodes._asking._asked is not None and time.monotonic() < until:
            found = self.nodes.others(of, THREE, lost, self.now)
        return found, self.asked - asked


def test_a_node_is_idle_once_it_has_said_so_twice():
    others, me = Others(), standing(THREE)
    me.idle, me.finished = True, {"b"}
    assert others.found(me) == (set(), 1)
    others.idle["c"] = True
    assert others.found(me) == (set(), 1)
    assert others.found(me) == ({"c"}, 1)
    others.idle["c"] = False
    assert others.found(me) == (set(), 1)
    others.idle["c"] = True
    assert others.found(me) == (set(), 1)


def test_it_asks_only_when_the_run_may_be_over():
    others, me = Others(), standing(THREE)
    others.idle = {"b": True, "c": True}
    assert others.found(me) == (set(), 0)
    me.finished = {"b"}
    assert others.found(me) == (set(), 0), "its own workers run"
    me.idle = True
    me.finished = set()
    assert others.found(me) == (set(), 0), "no other is done: none may be left that ends the run"
    me.finished = {"b"}
    assert others.found(me, lost={"c"}) == (set(), 0), "a loss is not decided"
    assert others.found(me) == (set(), 1)
    assert others.found(me) == ({"b", "c"}, 1)
    me.finished = {"b", "c"}
    assert others.found(me) == (set(), 0), "the links have told it"
    me.finished = {"b"}
    assert others.found(me) == (set(), 1), "what they said before does not count any more"
