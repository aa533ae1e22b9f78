"""Who the members of worlds are, and whom to ask for them."""

from __future__ import annotations

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


def told(*worlds):
    return {"worlds": list(worlds)}


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
