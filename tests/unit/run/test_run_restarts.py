"""When a failed worker is started again: pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.run.nodes import rank_assignment
from multiworld.run.nodes.slots import Assignment, Node, NodeRecord
from multiworld.run.workers.ranks import WorkerRank, environment, prefixes, worker_ranks
from multiworld.run.workers.restarts import Restart, Restarts
from multiworld.run.worldsfile.worlds_plan import PlannedMember, PlannedWorld, Role, WorldsPlan


def test_no_restarts_by_default_as_under_torchrun():
    restarts = Restarts(0, 1.0, 30.0)
    assert restarts.failed(3, came_up=True) is None
    assert restarts.attempt(3) == 0


def test_a_worker_that_does_not_come_up_waits_longer_each_time():
    restarts = Restarts(8, 1.0, 10.0)
    delays = [restarts.failed(0, came_up=False) for _ in range(8)]
    assert [r.delay for r in delays] == [0, 1, 2, 4, 8, 10, 10, 10]
    assert [r.left for r in delays] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert [r.attempt for r in delays] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert restarts.failed(0, came_up=False) is None
    assert restarts.failed(0, came_up=True) is None, "having come up gives no more restarts"


def test_having_come_up_ends_the_row():
    restarts = Restarts(9, 1.0, 10.0)
    told = [False, False, False, True, False, False, True, True]
    assert [restarts.failed(0, came_up=up).delay for up in told] == [0, 1, 2, 0, 0, 1, 0, 0]


def test_workers_are_counted_one_by_one():
    restarts = Restarts(1, 1.0, 10.0)
    assert restarts.failed(0, came_up=False) == Restart(0.0, 1, 0)
    assert restarts.failed(1, came_up=False) == Restart(0.0, 1, 0)
    assert restarts.failed(0, came_up=False) is None
    assert (restarts.attempt(0), restarts.attempt(1), restarts.attempt(2), restarts.total()) == (1, 1, 0, 2)


def test_thousands_of_failures_are_no_overflow():
    restarts = Restarts(3000, 1.0, 30.0)
    assert max(restarts.failed(0, came_up=False).delay for _ in range(3000)) == 30.0
    assert Restarts(1, 0.0, 30.0).failed(0, came_up=False).delay == 0


@given(
    st.integers(0, 20),
    st.floats(0, 100),
    st.floats(0, 1000),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80),
)
def test_whatever_happens_the_promises_hold(most, backoff, longest, story):
    restarts = Restarts(most, backoff, longest)
    granted = dict.fromkeys(range(4), 0)
    for rank, came_up in story:
        decision = restarts.failed(rank, came_up=came_up)
        assert (decision is None) == (granted[rank] == most)
        if decision is not None:
            granted[rank] += 1
            assert decision.attempt == granted[rank] == restarts.attempt(rank)
            assert decision.left == most - granted[rank]
            assert 0 <= decision.delay <= max(longest, 0)
            assert not came_up or decision.delay == 0
    assert restarts.total() == sum(granted.values())


PLAN = WorldsPlan(
    (Role("hub", 1, 1), Role("worker", 3, 2)),
    (
        PlannedWorld(
            "w",
            (PlannedMember("hub", 0), PlannedMember("worker", 2)),
            "gloo",
            "launcher",
            None,
            None,
            None,
            (),
            3,
        ),
    ),
    "w.toml",
)


def test_places_without_a_plan_are_torchruns():
    found = worker_ranks(Assignment(1, 2, 4, 2, "", base_role_rank=2, role_world_size=4), 2, "default", None)
    assert found == (WorkerRank(0, 2, 4, "default", 2, 4), WorkerRank(1, 3, 4, "default", 3, 4))
    assert environment(found[1], 5) == {
        "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "5",
    }  # fmt: skip


def test_nodes_with_roles_of_their_own_count_the_workers_of_each_as_torchrun_does():
    nodes = [
        Node(name, name, "127.0.0.1", 1, 1, capacity, role, "", 0)
        for name, capacity, role in (("a", 2, "trainer"), ("b", 1, "reader"), ("c", 2, "trainer"))
    ]
    members = rank_assignment.form([NodeRecord(each) for each in nodes], counts=None, token="ab" * 16)
    found = {
        each.id: [
            (place.rank, place.role, place.role_rank, place.role_size)
            for place in worker_ranks(
                rank_assignment.assignment(members, each.id), each.capacity, each.role, None
            )
        ]
        for each in nodes
    }
    assert found == {
        "a": [(0, "trainer", 0, 4), (1, "trainer", 1, 4)],
        "b": [(2, "reader", 0, 1)],
        "c": [(3, "trainer", 2, 4), (4, "trainer", 3, 4)],
    }


def test_places_of_a_plan_have_its_roles():
    found = worker_ranks(Assignment(0, 0, 4, 1, ""), 4, "default", PLAN)
    assert [(p.rank, p.role, p.role_rank, p.role_size) for p in found] == [
        (0, "hub", 0, 1), (1, "worker", 0, 3), (2, "worker", 1, 3), (3, "worker", 2, 3),
    ]  # fmt: skip


def test_a_spare_has_no_places():
    assert worker_ranks(Assignment(None, 0, 4, 2, ""), 2, "default", PLAN) == ()


@pytest.mark.parametrize(
    ("template", "head"),
    [("[${role_name}:${rank}] ", "[worker:3] "), ("${local_rank}${other}", "1${other}")],
)
def test_prefixes_follow_torchs_template(template, head):
    assert prefixes(template, WorkerRank(1, 3, 4, "worker", 2, 3)) == {1: head}
    assert prefixes(None, WorkerRank(1, 3, 4, "worker", 2, 3)) is None
