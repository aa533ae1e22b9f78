"""Which workers are started and retired, what stands against it, and when a retired one is signalled."""

from __future__ import annotations

from signal import Signals

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.run.errors import ArgumentsError
from multiworld.run.workers.retirements import Retirements
from multiworld.run.workers.scaling import (
    DRAIN,
    POLICIES,
    Change,
    Command,
    Worker,
    changed,
    choose,
    read,
    spared,
    spares,
)  # fmt: skip
from multiworld.run.worldsfile.parse import parse

PLAN = parse(
    '[roles]\nhub = 1\ntrainer = "2:5"\n[worlds.train]\nmembers = ["trainer:*"]\n'
    '[worlds.all]\nmembers = ["hub:0", "trainer:*"]\n[worlds.some]\nmembers = ["hub:0", "trainer:1"]\n',
    "plan.toml",
)
PLACES = tuple(range(PLAN.world_size))


def crew(*ranks, waiting=()):
    """Workers in the order of their start."""
    return [Worker(rank, float(at), member=rank not in waiting) for at, rank in enumerate(ranks)]


def change(said, workers, busy=(), nodes=1, places=PLACES, plan=PLAN, vacant=()):
    return changed(read(said), plan, places, workers, busy, nodes=nodes, vacant=vacant)


def test_who_goes_first():
    workers = crew(1, 4, 2, 3, 5, waiting=(2,))
    assert choose(workers, 3, "newest") == (2, 5, 3)
    assert choose(workers, 3, "oldest") == (2, 1, 4)
    assert choose(workers, 3, "highest") == (2, 5, 4)
    restarting = [Worker(1, 0.0, member=False), Worker(2, float("inf"), member=False)]
    assert choose(restarting, 1, "newest") == (2,)


@given(st.sets(st.integers(1, 5)), st.integers(0, 5), st.sampled_from(POLICIES), st.data())
def test_a_choice_is_of_as_many_as_asked_for(ranks, number, policy, data):
    workers = crew(*data.draw(st.permutations(sorted(ranks))), waiting=data.draw(st.sets(st.integers(1, 5))))
    chosen = choose(workers, number, policy)
    assert len(chosen) == len(set(chosen)) == min(number, len(workers))
    waiting = {each.rank for each in workers if not each.member}
    assert set(chosen) <= waiting or waiting <= set(chosen)


def test_more_workers_take_the_lowest_places_that_are_free():
    assert change({"workers": 4}, crew(0, 2, 3)) == Change(start=(1, 4))
    assert change({"workers": 4}, crew(0, 2, 3), busy=(1,)) == Change(start=(4, 5))
    assert change({"workers": 5}, crew(0, 2, 3), busy=(1,)) == Change(start=(1, 4, 5))
    assert change({"workers": 2}, crew(0, 2, 3)) == Change()


def test_fewer_workers():
    assert change({"workers": 2, "drain": 5}, crew(0, 1, 2, 3)) == Change(retire=(3,), drain=5)
    assert change({"workers": 2, "policy": "oldest"}, crew(0, 1, 2, 3)) == Change(retire=(1,), drain=DRAIN)
    assert change({"worker": "trainer:1"}, crew(0, 1, 2, 3)).retire == (2,)
    assert change({"worker": "1"}, crew(0, 1, 2, 3)).retire == (1,)


def test_a_worlds_size():
    assert change({"world": "train", "size": 4}, crew(0, 1, 2)).start == (3, 4)
    assert change({"world": "all", "size": 3}, crew(0, 1, 2, 3)).retire == (3,)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"workers": 6}, "6 workers of role trainer. This node may have 2 to 5 of them"),
        ({"workers": 1}, "1 workers of role trainer. This node may have 2 to 5 of them"),
        ({"workers": 2, "role": "hub"}, "--role hub. It is one of trainer"),
        ({"worker": "hub:0"}, "worker hub:0. Its role is of a range"),
        ({"worker": "5"}, "worker 5. It runs on this node"),
        ({"worker": "trainer:9"}, "worker 'trainer:9'. It is a rank"),
        ({"worker": "trainer:٣"}, "It is a rank"),
        ({"worker": "trainer:0000000009"}, "worker 'trainer:0000000009'. It is a rank"),
        ({"worker": "trainer:0000000001"}, "worker 'trainer:0000000001'. It is a rank"),
        ({"worker": "0000000001"}, "worker '0000000001'. It is a rank"),
        ({"worker": "6"}, "worker '6'. It is a rank"),
        ({"worker": ":1"}, "worker ':1'. It is a rank"),
        ({"worker": "trainer:0"}, "retiring trainer:0. Role trainer has at least 2 workers"),
        ({"world": "train", "size": 6}, "--world train --size 6. Its size is 2 to 5"),
        ({"world": "some", "size": 1}, "--world some. All workers of one role of a range are its members"),
        ({"world": "none", "size": 1}, "--world none. It is one of train, all"),
        ({"workers": 2, "policy": "best"}, "--policy best. It is one of newest, oldest, highest"),
    ],
)  # fmt: skip
def test_what_is_refused(said, words):
    with pytest.raises(ArgumentsError) as caught:
        change(said, crew(0, 1, 2))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        {}, {"workers": -1}, {"workers": True}, {"workers": "2"}, {"size": 2}, {"world": "train"}, {"worker": 1},
        {"workers": 1, "worker": "1"}, {"workers": 1, "more": 1}, {"workers": 1, "drain": -1},
        {"workers": 1, "drain": float("nan")}, {"workers": 1, "policy": None}, {"workers": 1, "drain": True},
    ],
)  # fmt: skip
def test_no_command(said):
    with pytest.raises(ArgumentsError):
        read(said)


def test_a_run_that_does_not_change():
    for plan in (None, parse("[roles]\na = 2\n", "p")):
        with pytest.raises(ArgumentsError, match="no role of a range"):
            change({"workers": 2}, crew(0, 1), plan=plan)
    with pytest.raises(ArgumentsError, match="this node has no workers"):
        change({"workers": 2}, crew(0, 1), nodes=0)


def test_one_of_several_nodes_has_its_own_places():
    here = (3, 4, 5)
    assert change({"workers": 0}, crew(3, 4, 5), nodes=2, places=here).retire == (5, 4, 3)
    assert change({"workers": 3}, crew(4), nodes=2, places=here).start == (3, 5)
    with pytest.raises(ArgumentsError, match="at least 2 workers"):
        change({"workers": 0}, crew(2, 3, 4, 5), nodes=2, places=(2, 3, 4, 5))
    with pytest.raises(ArgumentsError, match="on 2 nodes"):
        change({"world": "train", "size": 2}, crew(3, 4), nodes=2, places=here)


def test_places_that_no_node_has_count_as_gone():
    with pytest.raises(ArgumentsError, match="at least 2 workers"):
        change({"workers": 1}, crew(1, 2, 3), nodes=3, places=(1, 2, 3), vacant=(4, 5))
    assert change({"workers": 2}, crew(1, 2, 3), nodes=3, places=(1, 2, 3), vacant=(4, 5)).retire == (3,)
    assert change({"workers": 1}, crew(1, 2, 3), nodes=3, places=(1, 2, 3), vacant=(5,)).retire == (3, 2)
    assert change({"workers": 1}, crew(), nodes=3, places=(1, 2, 3), vacant=(4, 5)).start == (1,)
    assert spared(PLAN, (3, 4, 5), crew(3, 4, 5), (1, 2)) == (5,)
    assert spared(PLAN, (3, 4, 5), crew(3, 4, 5), (1,)) == (4, 5)
    assert spares(PLAN, 3, (1, 2, 3), crew(1, 2), (4, 5))
    assert not spares(PLAN, 3, (2, 3), crew(2), (1, 4, 5))


def test_who_can_be_spared():
    assert spared(PLAN, PLACES, crew(0, 3, 1, 5)) == (5,)
    assert spared(PLAN, (3, 4, 5), crew(3, 4, 5)) == (3, 4, 5)
    assert spared(None, (0, 1), crew(0, 1)) == ()
    assert spares(PLAN, 3, PLACES, crew(0, 1, 2))
    assert not spares(PLAN, 3, PLACES, crew(0, 1))
    assert not spares(PLAN, 0, PLACES, crew(1, 2, 3))
    assert not spares(PLAN, 3, (3, 4, 5), []), "what fails on all workers of a node ends the run"


def test_a_retired_worker_gets_one_signal_after_the_other():
    retirements = Retirements(grace=3)
    retirements.begin(2, 10, now=100)
    retirements.begin(4, 20, now=100)
    assert (2 in retirements, retirements.ranks, retirements.at()) == (True, (2, 4), 110)
    assert retirements.due(109.9) == []
    assert retirements.due(110) == [(2, Signals.SIGTERM)]
    assert (retirements.due(110), retirements.at()) == ([], 113)
    assert retirements.due(113) == [(2, Signals.SIGKILL)]
    assert (retirements.due(1000), retirements.due(1000)) == ([(4, Signals.SIGTERM)], [])
    retirements.ended(2)
    retirements.ended(2)
    retirements.ended(4)
    assert (2 in retirements, retirements.at()) == (False, float("inf"))
    assert Command().policy == POLICIES[0]
