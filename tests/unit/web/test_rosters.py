"""Who the members of worlds are, and whom to ask for them."""

from __future__ import annotations

import pytest

from multiworld.web.rosters import Rosters, newest

ROWS = [[0, 10, "alpha", ""], [1, 11, "alpha", ""]]


def said(name="w", generation=1, members=(), **more):
    return {
        "name": name,
        "rank": 0,
        "state": "active",
        "generation": generation,
        "members": list(members),
        **more,
    }


def told(*worlds, pid=10, host="alpha"):
    return {"pid": pid, "host": host, "worlds": list(worlds)}


def test_members_are_asked_of_one_worker_and_once():
    rosters = Rosters()
    statuses = {3: told(said(), said("v")), 1: told(said()), 5: told({"name": "new", "state": "joining"})}
    assert rosters.lacking(statuses) == {"1": ["w"], "3": ["v"]}
    rosters.learn({1: told(said(members=ROWS))})
    assert rosters.of("w", 1) == ROWS
    assert rosters.of("w", 2) == rosters.of("v", 1) == []
    assert rosters.lacking(statuses) == {"3": ["v"]}


def test_a_later_generation_is_asked_for_of_one_that_is_in_it():
    rosters = Rosters()
    rosters.learn({1: told(said(members=ROWS))})
    assert rosters.lacking({1: told(said()), 4: told(said(generation=2))}) == {"4": ["w"]}
    rosters.learn({4: told(said(generation=2, members=ROWS[:1])), 5: told(said(members=ROWS))})
    assert rosters.of("w", 2) == ROWS[:1], "what an old one says late does not count"


@pytest.mark.parametrize("generation", [1, 3])
def test_a_world_that_begins_anew_has_other_members(generation):
    rosters = Rosters()
    assert rosters.learn({1: told(said(generation=3, members=ROWS))}) == set()
    again = told(said(generation=generation), pid=20)
    assert rosters.learn({1: again}) == {"w"}
    assert rosters.lacking({1: again}) == {"1": ["w"]}
    rows = [[0, 21, "alpha", ""], [1, 20, "alpha", ""]]
    assert rosters.learn({1: told(said(generation=generation, members=rows), pid=20)}) == set()
    assert rosters.of("w", generation) == rows


def test_who_says_something_late_is_no_new_beginning():
    rosters = Rosters()
    rosters.learn({1: told(said(generation=3, members=ROWS))})
    late, left_out = told(said(generation=2), pid=11), told(said(generation=2), pid=12)
    assert rosters.learn({2: late}) == rosters.learn({1: told(said(generation=3)), 3: left_out}) == set()
    assert rosters.of("w", 3) == ROWS


def test_worlds_that_are_gone_are_forgotten():
    rosters = Rosters()
    rosters.learn({1: told(said(members=ROWS), said("v", members=ROWS))})
    rosters.keep({"v"})
    assert (rosters.of("w", 1), rosters.of("v", 1)) == ([], ROWS)


def test_the_newest_counts_and_a_verdict_more_than_a_join():
    joining = said(generation=2, state="joining", rank=0)
    broken = said(generation=2, state="broken", rank=1)
    assert (
        newest({0: said(generation=1), 1: joining, 2: broken, 3: {"name": "w", "state": "joining"}}) is broken
    )
    assert newest({3: {"name": "w", "state": "joining"}}) is None
