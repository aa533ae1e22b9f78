"""Worlds at a store that is a list: hosts and processes are lost, networks fall apart, in simulated time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.lifekit import seat
from kits.listkit import Hosts
from test_membership_elastic_simulated import settled

SEEDS = st.integers(0, 2**32)
SOME = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CALM = 14.0
"""Simulated seconds, after the last fault."""


def check(sim):
    made = {}
    for life in sim.lives:
        for roster in life.rosters:
            same = made.setdefault(roster.generation, (roster.token, roster.members))
            assert same == (roster.token, roster.members), "two rosters for one number"
        numbers = [roster.generation for roster in life.rosters]
        assert numbers == sorted(set(numbers)), "a generation's number never goes back"


def begun(sim, size):
    for who in range(size):
        sim.life(seat(who, 1, size), timeout=30.0)


@SOME
@given(SEEDS, st.integers(2, 6))
def test_a_world_begins(seed, size):
    sim = Hosts(seed, end=5.0)
    begun(sim, size)
    sim.run()
    check(sim)
    assert {life.active.size for life in sim.lives} == {size}


@SOME
@given(SEEDS, st.integers(2, 6), st.data())
def test_processes_are_lost_and_so_are_servers(seed, size, data):
    sim = Hosts(seed, end=CALM + 9.0)
    begun(sim, size)
    for victim in data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1), "victims"):
        at = data.draw(st.floats(0.0, 9.0), "at")
        if data.draw(st.booleans(), "leaves"):
            sim.lives[victim].leave_at = at
        else:
            sim.lives[victim].die_at = at
    sim.run()
    check(sim)
    settled(sim, 1)


def falls_apart(sim, data, at):
    """Cut the network to pieces, again and again, from `at` on; then it is whole."""
    for _ in range(data.draw(st.integers(1, 4), "cuts")):
        at += data.draw(st.floats(0.0, 3.0), "after")
        sim.cuts.append((at, tuple(data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3), "parts"))))
    sim.cuts.append((at + data.draw(st.floats(0.0, 3.0), "whole"), (0, 0, 0)))


@SOME
@given(SEEDS, st.integers(2, 6), st.data())
def test_a_network_falls_apart_and_is_whole_again(seed, size, data):
    sim = Hosts(seed, end=3.0 + 5 * 3.0 + CALM)
    begun(sim, size)
    falls_apart(sim, data, 3.0)
    if data.draw(st.booleans(), "one dies"):
        sim.lives[data.draw(st.integers(0, size - 1), "victim")].die_at = data.draw(
            st.floats(3.0, 9.0), "dies"
        )
    sim.run()
    check(sim)
    settled(sim, 1)


@pytest.mark.parametrize(
    ("seed", "size", "cuts", "victim", "dies"),
    [
        (3, 3, [(3.0, (0, 0, 1)), (5.0, (0, 0, 0))], 0, 4.0),
        (3, 3, [(3.0, (0, 0, 1)), (5.0, (0, 1, 0)), (6.0, (0, 0, 0))], 0, 4.0),
        (44, 5, [(3.53, (0, 1, 0)), (4.2, (0, 0, 0))], 0, 3.94),
        (380, 3, [(5.35, (1, 2, 1)), (6.02, (2, 0, 2)), (7.6, (1, 2, 2)), (9.46, (0, 0, 0))], 2, 6.33),
        (1296, 5, [(5.58, (0, 2, 2)), (6.91, (1, 2, 0)), (9.56, (0, 2, 0)), (11.06, (0, 0, 0))], 2, 6.03),
    ],
)
def test_a_member_that_dies_may_have_gone_on_with_others_before(seed, size, cuts, victim, dies):
    """Two parts went on: one with the member that died, and one that left it out of its majority."""
    sim = Hosts(seed, end=3.0 + 5 * 3.0 + CALM)
    begun(sim, size)
    sim.cuts = list(cuts)
    sim.lives[victim].die_at = dies
    sim.run()
    check(sim)
    settled(sim, 1)


@SOME
@given(SEEDS, st.integers(2, 6), st.data())
def test_a_number_has_one_roster_even_where_a_world_begins_in_pieces(seed, size, data):
    sim = Hosts(seed, end=10.0)
    begun(sim, size)
    falls_apart(sim, data, 0.0)
    sim.run()
    check(sim)
