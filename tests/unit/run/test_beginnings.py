"""Worlds of a range at a store that has moved: held until no member of theirs can be elsewhere."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from multiworld._net.stores.held_worlds import held
from multiworld.run import events
from multiworld.run.nodes import beginnings
from multiworld.run.nodes.beginnings import SAID, Beginnings, waited_for
from multiworld.run.nodes.slots import Membership, Node
from multiworld.run.nodes.working_worlds import WorkingWorlds
from multiworld.run.nodes.world_store import WorldStore
from multiworld.run.worldsfile.worlds_plan import LAUNCHER, PlannedMember, PlannedWorld, Role, WorldsPlan

NODES = tuple(Node(name, f"host-{name}", "127.0.0.1", 1, 1, 1, "", f"tcp://{name}:1") for name in "abc")
HERE = "tcp://a:1"


def says(node, store=HERE, **members):
    return {"node": node, "store": store, "members": members}


def membership(epoch, store_node="a"):
    return Membership(epoch, "00", store_node, (), NODES)


# -- the decision


def test_all_launchers_have_to_say_that_no_worker_is_a_member():
    free = [says("a"), says("b"), says("c", other=[1])]
    assert waited_for("w", free, NODES, HERE) == ""
    assert waited_for("w", free[:2], NODES, HERE) == (
        "the launchers of host-c to say whether a worker of theirs is a member"
    )
    assert waited_for("w", [], NODES, HERE).startswith("the launchers of host-a, host-b, host-c ")
    found = waited_for("w", [*free[:2], says("c", w=[4])], NODES, HERE)
    assert found.startswith("worker 4, a member of it, to tell the run's new store of it")
    found = waited_for("w", [says("a", w=[2]), says("c", w=[1])], NODES, HERE)
    assert found.startswith("workers 1, 2, members of it, to tell ")


def test_what_a_launcher_says_that_knows_another_store_does_not_count():
    before = [says("a"), says("b", "tcp://gone:1"), says("c")]
    assert "host-b" in waited_for("w", before, NODES, HERE)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.sets(st.integers(0, 3)))))
def test_a_member_that_is_told_of_is_never_overlooked(said):
    every = [says(node, HERE if here else "tcp://gone:1", w=sorted(ranks)) for node, here, ranks in said]
    told = {each["node"]: each for each in every if each["store"] == HERE}  # the last word of each counts
    free = set(told) == set("abc") and not any(each["members"]["w"] for each in told.values())
    assert (waited_for("w", every, NODES, HERE) == "") == free


# -- the workers of this node


def world(name, *, least=1, store=LAUNCHER, last_call=None):
    member = PlannedMember("worker", 0)
    return PlannedWorld(name, (member,), "gloo", store, None, None, None, (), 1, least, 2, last_call)


def changed(rank, state, name="w"):
    return events.WorldChanged(0.0, rank, name, state, 1)


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def working(clock):
    worlds = world("w", last_call=5.0), world("fixed", least=0), world("away", store="tcp://h:1")
    return WorkingWorlds(WorldsPlan((Role("worker", 2, 1),), worlds, "plan.toml"), lambda: clock[0])


def test_only_worlds_of_a_range_at_the_launchers_store_are_kept(working):
    assert working.names == ("w",)
    for name in ("w", "fixed", "away"):
        working.hear(changed(0, "active", name))
    assert working.members() == {"w": [0]}
    assert WorkingWorlds(None).names == ()


@pytest.mark.parametrize("state", ["broken", "joining", "failed"])
def test_a_member_of_a_broken_world_is_one_for_the_last_call(working, clock, state):
    working.hear(changed(0, "active"))
    working.hear(changed(0, state))
    clock[0] += 4.9
    working.hear(changed(0, "joining"))  # it does not begin anew
    assert working.members() == {"w": [0]}
    clock[0] += 0.2
    assert working.members() == {}
    working.hear(changed(0, "active"))
    assert working.members() == {"w": [0]}


def test_a_newcomer_that_is_not_in_yet_is_none(working):
    working.hear(changed(0, "joining"))
    working.hear(changed(0, "failed"))
    assert working.members() == {}


@pytest.mark.parametrize(
    "end",
    [
        changed(0, "closed"),
        events.WorkerEnded(0.0, 0, 1),
        events.WorkerFailed(0.0, 0, 1, 0, 1, ""),
        events.WorkerStopped(0.0, 0, 1, -9),
        events.WorkerStarted(0.0, 0, "worker", 0, 0, 1, 1),
    ],
)
def test_who_closes_it_or_ends_is_none(working, end):
    working.hear(changed(0, "active"))
    working.hear(changed(1, "active"))
    working.hear(end)
    assert working.members() == {"w": [1]}


# -- at a store


@pytest.fixture
def store():
    with contextlib.closing(WorldStore("127.0.0.1")) as served:
        yield served


@pytest.fixture
def client(store):
    host, port = store.address.removeprefix("tcp://").split(":")
    return dist.TCPStore(host, int(port), is_master=False)


def wait(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_store_of_a_run_releases_its_worlds_at_once(store, client):
    every = Beginnings(("w", "ü/x"), dict, lambda _: [])
    every.hold(store)
    assert held(client, "w") == held(client, "ü/x") == "the launchers to agree where its store is"
    assert held(client, "another") == ""
    every.follow(membership(1), "a")
    assert held(client, "w") == held(client, "ü/x") == ""
    every.close()


def test_a_store_that_is_not_the_present_one_holds_all(store, client):
    every = Beginnings(("w",), dict, lambda _: [])
    every.hold(store)
    every.follow(membership(1, "b"), "a")
    assert held(client, "w")
    every.close()


def test_a_later_store_releases_a_world_that_no_launcher_knows_members_of(store, client):
    said, asked = {"b": says("b", store.address, w=[3]), "c": says("c", store.address)}, []

    def ask(_):
        asked.append(time.monotonic())
        return [{SAID: each} for each in said.values()]

    every = Beginnings(("w", "v"), lambda: says("a", store.address), ask)
    every.hold(store)
    every.follow(membership(2), "a")
    wait(lambda: held(client, "v") == "")
    assert time.monotonic() - asked[0] >= beginnings.SETTLED
    assert held(client, "w").startswith("worker 3, a member of it")
    said["b"] = says("b", store.address)
    wait(lambda: held(client, "w") == "")
    every.follow(membership(3, "b"), "a")  # this node had to give its store up
    assert held(client, "w")
    assert held(client, "v")
    every.close()


def test_a_store_that_does_not_answer_lets_no_world_begin(store, client):
    store.close()
    assert held(client, "w") == "its store, which does not answer"
