"""Throughput between members."""

from __future__ import annotations

from multiworld.web import links
from multiworld.web.links import EVERY, Links


def said(rank, sent=(), received=(), generation=1):
    return {"rank": rank, "generation": generation, "sent": list(sent), "received": list(received)}


def shown(found):
    return [(each["from"], each["to"], each["messages"], each["bytes"], each["rate"]) for each in found]


def test_both_ends_tell_of_a_link_and_it_is_one():
    told = {7: said(0, sent=[[1, 3, 300]], received=[[2, 1, 50]]), 8: said(1, received=[[0, 2, 200]])}
    assert shown(Links().of("w", 1, told, 10.0)) == [(0, 1, 3, 300, 0.0), (2, 0, 1, 50, 0.0)]


def test_a_rate_is_of_the_time_since_the_last_look():
    kept = Links()
    kept.of("w", 1, {0: said(0, sent=[[1, 1, 1000]])}, 10.0)
    more = {0: said(0, sent=[[1, 5, 5000], [2, 1, 7]])}
    assert shown(kept.of("w", 1, more, 10.0 + EVERY / 2)) == [(0, 1, 1, 1000, 0.0)], "not at each look"
    assert shown(kept.of("w", 1, more, 14.0)) == [(0, 1, 5, 5000, 1000.0), (0, 2, 1, 7, 0.0)]
    assert shown(kept.of("w", 1, more, 18.0))[0] == (0, 1, 5, 5000, 0.0)
    assert shown(kept.of("other", 1, more, 18.0))[0][-1] == 0.0


def test_a_clock_that_is_set_back_does_not_stop_the_numbers():
    kept = Links()
    kept.of("w", 1, {0: said(0, sent=[[1, 1, 1000]])}, 5000.0)
    more = {0: said(0, sent=[[1, 5, 5000]])}
    assert shown(kept.of("w", 1, more, 1400.0)) == [(0, 1, 5, 5000, 0.0)]
    more = {0: said(0, sent=[[1, 9, 9000]])}
    assert shown(kept.of("w", 1, more, 1404.0)) == [(0, 1, 9, 9000, 1000.0)]


def test_a_generation_begins_anew():
    kept = Links()
    old = {0: said(0, sent=[[1, 9, 9000]])}
    kept.of("w", 1, old, 10.0)
    told = {**old, 1: said(1, sent=[[0, 1, 10]], generation=2)}
    assert shown(kept.of("w", 2, told, 10.1)) == [(1, 0, 1, 10, 0.0)]
    assert len(kept._kept) == 1


def test_only_the_largest_are_shown_and_a_joining_member_tells_nothing(monkeypatch):
    monkeypatch.setattr(links, "MOST", 2)
    told = {
        0: said(0, sent=[[rank, 1, rank * 10] for rank in range(1, 6)]),
        1: {"name": "w", "state": "joining"},
    }
    assert shown(Links().of("w", 1, told, 1.0)) == [(0, 4, 1, 40, 0.0), (0, 5, 1, 50, 0.0)]
