"""Who sits where: rules, and random losses and arrivals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.run.nodes import slots as seats
from multiworld.run.nodes.slots import Card, Node

TOKEN = "ab" * 16


def node(name, capacity=1, role="", since=0):
    return Node(name, f"host-{name}", "127.0.0.1", 1, 1, capacity, role, f"tcp://{name}:1", since)


def met(*names, total=None, capacity=1):
    counts = None if total is None else (total,)
    return seats.meet([Card(node(name, capacity)) for name in names], counts=counts, token=TOKEN)


def holders(table):
    return [chair.holder for chair in table.chairs]


def card(table, name, alive=(), done=()):
    """Of a node that sits at the table."""
    return Card(table.node(name), table, tuple(alive), tuple(done))


def test_without_a_worlds_file_everyone_has_a_seat():
    table = met("a", "b", "c", capacity=4)
    assert holders(table) == ["a", "b", "c"]
    assert [table.ranks_of(seat) for seat in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert (table.epoch, table.token, table.keeper) == (1, TOKEN, "a")
    assert {each.since for each in table.nodes} == {1}


def test_a_worlds_file_says_how_many_seats_there_are():
    table = met("a", "b", "c", total=4, capacity=2)
    assert holders(table) == ["a", "b"]
    assert seats.seating(table, "c").seat is None
    assert seats.seating(table, "c").world_size == 4


def sizes(table):
    return {holder: chair.capacity for holder, chair in zip(holders(table), table.chairs, strict=True)}


@pytest.mark.parametrize(
    ("total", "nodes", "each", "shares"),
    [(7, "ab", 4, [4, 3]), (7, "abc", 3, [3, 2, 2]), (9, "ab", 5, [5, 4]), (9, "abc", 8, [5, 4]), (8, "abc", 4, [4, 4]),
     (1, "ab", 8, [1])],
)  # fmt: skip
def test_workers_that_do_not_divide_are_dealt_evenly(total, nodes, each, shares):
    """The shipped worlds file has 7 workers; the page's example 9, on nodes of 8."""
    table = met(*nodes, total=total, capacity=each)
    assert [chair.capacity for chair in table.chairs] == shares
    assert all(chair.holder for chair in table.chairs)
    assert [seats.seating(table, name).size for name in nodes] == [*shares, *[0] * (len(nodes) - len(shares))]


@pytest.mark.parametrize("order", ["hab", "ahb", "abh"])
def test_a_hubs_node_of_one_worker_stands_beside_nodes_of_eight(order):
    """Wherever torch's rendezvous puts it: it has the hub, which is rank 0."""
    cards = [Card(node(name, 1 if name == "h" else 8)) for name in order]
    table = seats.meet(cards, counts=(1, 16), token=TOKEN)
    assert holders(table) == ["h", "a", "b"]
    assert table.ranks_of(0) == (0,)
    assert [seats.seating(table, name).size for name in "hab"] == [1, 8, 8]
    assert seats.vacant(table) == ()


def test_a_spare_with_more_room_takes_the_seat_and_the_smallest_that_fits_comes_first():
    cards = [Card(node(name, room)) for name, room in (("a", 2), ("b", 4), ("c", 8), ("d", 4), ("e", 1))]
    table = seats.meet(cards, counts=(6,), token=TOKEN)
    assert sizes(table) == {"a": 2, "b": 4}
    after = seats.leave(table, {"b"})
    assert sizes(after) == {"a": 2, "d": 4}
    after = seats.leave(after, {"a"})
    assert sizes(after) == {"c": 2, "d": 4}


def test_too_few_nodes_leave_seats_free():
    table = met("a", total=5, capacity=2)
    assert holders(table) == ["a", None, None]
    assert [chair.capacity for chair in table.chairs] == [2, 2, 1]
    assert seats.vacant(table) == (2, 3, 4)


def test_a_spare_that_fits_has_the_lost_nodes_seat():
    table = seats.leave(met("a", "b", "c", total=2), {"b"})
    assert holders(table) == ["a", "c"]
    assert seats.seating(table, "c") == seats.Seating(1, 1, 2, 2, "tcp://a:1", 1, 2, size=1)
    assert table.epoch == 2


def test_a_spare_of_another_size_or_role_does_not_fit():
    cards = [Card(node("a", 2)), Card(node("b", 2)), Card(node("c", 1))]
    assert holders(seats.leave(seats.meet(cards, counts=(4,), token=TOKEN), {"b"})) == ["a", None]
    cards = [Card(node("a", 1, "x")), Card(node("b", 1, "y"))]
    table = seats.leave(seats.meet(cards, counts=None, token=TOKEN), {"a"})
    table = seats.meet([card(table, "b"), Card(node("c", 1, "y"))], counts=None, token="")
    assert holders(table) == [None, "b"]


def test_ranks_of_roles_without_a_worlds_file():
    cards = [Card(node("a", 2, "x")), Card(node("b", 1, "y")), Card(node("c", 3, "x"))]
    table = seats.meet(cards, counts=None, token=TOKEN)
    places = [seats.seating(table, name, ("m", 1)) for name in "abc"]
    assert [(each.base_rank, each.base_role_rank, each.role_world_size) for each in places] == [
        (0, 0, 5), (2, 0, 1), (3, 2, 5),
    ]  # fmt: skip
    assert {each.master for each in places} == {("m", 1)}


def test_who_comes_back_has_its_own_seat():
    table = met("a", "b", "c")
    table = seats.leave(seats.leave(table, {"b"}), {"c"})
    assert holders(table) == ["a", None, None]
    table = seats.meet([Card(node("c")), card(table, "a")], counts=None, token="")
    assert holders(table) == ["a", None, "c"]
    assert table.node("c").since == table.epoch
    assert table.node("a").since == 1


def test_a_node_that_comes_late_and_lives_keeps_its_seat():
    table = met("a", "b", "c", total=2)
    after = seats.meet([card(table, "a", alive="b"), card(table, "c")], counts=(2,), token="")
    assert holders(after) == ["a", "b"]
    assert after.node("b").since == 1
    after = seats.meet([card(table, "a"), card(table, "c")], counts=(2,), token="")
    assert holders(after) == ["a", "c"]


def test_who_gave_up_its_seat_is_a_newcomer():
    table = met("a", "b")
    after = seats.meet([card(table, "a", alive="b"), Card(node("b"))], counts=None, token="")
    assert holders(after) == ["a", "b"]
    assert after.node("b").since == after.epoch


def test_the_newest_table_counts():
    old = met("a", "b", "c", total=2)
    new = seats.leave(old, {"a"})
    after = seats.meet([Card(old.node("a"), old), card(new, "b"), card(new, "c")], counts=(2,), token="")
    assert holders(after) == ["c", "b"]
    assert seats.seating(after, "a").seat is None


def test_the_store_stays_where_it_is_as_long_as_its_node_lives():
    table = met("a", "b", "c")
    assert seats.leave(table, {"c"}).keeper == "a"
    table = seats.leave(table, {"a"})
    assert table.keeper == "b"
    assert (
        seats.meet([card(table, "b"), card(table, "c"), Card(node("a"))], counts=None, token="").keeper == "b"
    )


def test_a_seat_whose_workers_have_ended_is_not_given_away():
    table = met("a", "b", "c", total=2)
    after = seats.leave(table, {"a"}, done={"a"})
    assert holders(after) == ["a", "b"]
    assert after.keeper == "b"
    assert seats.over(after, {"a"}, ()) is None
    assert seats.over(after, {"a", "b"}, ()) == ()
    again = seats.meet([card(after, "b", done="a"), card(after, "c")], counts=(2,), token="")
    assert holders(again) == ["a", "b"]


def test_the_run_is_over_when_every_seat_is_done_or_free():
    table = met("a", "b", "c")
    assert seats.over(table, {"a", "b"}, ()) is None
    assert seats.over(table, {"a", "b"}, {"c"}) is None  # nobody has judged it yet
    assert seats.over(seats.leave(table, {"c"}), {"a", "b"}, ()) == (2,)
    assert seats.over(table, {"a", "b", "c"}, {"c"}) == ()


def test_a_spare_that_is_done_and_gone_had_the_free_seat():
    """Its table was on its way: the lost node's ranks have ended their work in its hands."""
    table = met("a", "b", "c", total=2)
    assert table.seat_of("c") is None
    after = seats.leave(table, {"b", "c"}, {"a", "c"})
    assert seats.over(after, {"a", "c"}, ()) == ()
    assert seats.over(seats.leave(table, {"b", "c"}, {"a"}), {"a"}, ()) == (1,)


def test_late_nodes_are_let_in():
    table = seats.leave(met("a", "b", "c"), {"b"})
    after = seats.admit(table, [node("d"), node("b")])
    assert holders(after) == ["a", "b", "c"]
    assert after.node("d").since == after.epoch
    again = seats.admit(after, [node("c")])  # it gave up and is back before anybody saw it
    assert holders(again) == ["a", "b", "c"]
    assert again.node("c").since == again.epoch


@pytest.mark.parametrize(
    ("nodes", "lost", "answers", "outside", "expected"),
    [
        ("abc", {"b": "unreachable"}, False, False, False),  # two of three: the store went with the third
        ("abc", {"b": "unreachable", "c": "hung"}, False, False, True),
        (
            "abc",
            {"b": "unreachable", "c": "hung"},
            True,
            False,
            True,
        ),  # the others are more, and decide without
        ("abc", {"b": "unreachable", "c": "hung"}, True, True, False),  # the store decides
        ("abc", {"b": "crashed", "c": "crashed"}, False, False, False),  # their kernels said so
        ("abc", {"b": "crashed", "c": "unreachable"}, False, False, True),
        ("ab", {"b": "unreachable"}, True, False, False),
        ("ab", {"b": "unreachable"}, False, False, True),
        ("ab", {"b": "left"}, False, True, False),
        ("ab", {"x": "unreachable"}, False, True, False),  # not at this table
        ("abcd", {"b": "hung", "c": "hung"}, True, False, False),
        ("abcd", {"b": "hung", "c": "hung"}, False, True, True),
    ],
)
def test_who_was_cut_off(nodes, lost, answers, outside, expected):
    assert seats.cut_off(met(*nodes), "a", lost, answers=answers, outside=outside) is expected


def test_both_sides_of_a_cut_never_go_on():
    """Whatever the cut, and wherever the store is: at most one side keeps its seats without a judge."""
    for size in range(2, 7):
        names = "abcdef"[:size]
        for cut in range(1, size):
            left, right = names[:cut], names[cut:]
            for answers in (left, right, ""):
                stays = [
                    not seats.cut_off(
                        met(*names), side[0], dict.fromkeys(other, "unreachable"),
                        answers=side == answers, outside=False,
                    )
                    for side, other in ((left, right), (right, left))
                ]  # fmt: skip
                assert sum(stays) <= 1, (left, right, answers)


def test_the_first_that_lives_decides():
    table = met("a", "b", "c")
    assert seats.leader(table, ()) == "a"
    assert seats.leader(table, {"a": "crashed"}) == "b"
    assert seats.leader(table, {"a", "b", "c"}) is None


def test_records_survive_json():
    table = met("a", "b", "c", total=2)
    assert seats.table_from(json.loads(json.dumps(seats.to_json(table)))) == table
    for each in (card(table, "a", alive="bc", done="b"), Card(node("x"))):
        assert seats.card_from(json.loads(json.dumps(seats.to_json(each)))) == each
    with pytest.raises((KeyError, TypeError, ValueError)):
        seats.table_from({"epoch": 1})


NAMES = "abcdefgh"
CAPACITIES = st.sampled_from([1, 1, 1, 2])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("lose"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=3)),
        st.tuples(st.just("come"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=3)),
        st.tuples(st.just("admit"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=2)),
        st.tuples(st.just("give up"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=1)),
        st.tuples(st.just("late"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=2)),
    ),
    max_size=25,
)


@given(
    first=st.sets(st.sampled_from(NAMES), min_size=1, max_size=5),
    total=st.one_of(st.none(), st.integers(1, 8)),
    capacities=st.lists(CAPACITIES, min_size=len(NAMES), max_size=len(NAMES)),
    steps=steps,
)
def test_seats_are_never_given_twice_and_nobody_who_lives_is_moved(first, total, capacities, steps):
    capacity = dict(zip(NAMES, capacities, strict=True))
    fresh = {name: node(name, capacity[name]) for name in NAMES}
    table = seats.meet(
        [Card(fresh[name]) for name in sorted(first)], counts=None if total is None else (total,), token=TOKEN
    )
    shape = [(chair.capacity, table.ranks_of(seat)) for seat, chair in enumerate(table.chairs)]
    check(table, total)
    there = set(first)
    for what, names in steps:
        before = table
        quitting: set[str] = set()
        if what == "lose":
            quitting = names & there
            if quitting == there:
                continue
            there -= quitting
            table = seats.leave(table, quitting)
        elif what == "admit":
            table = seats.admit(table, [fresh[name] for name in sorted(names)])
            quitting = names & there  # they would not ask if they had not given up
            there |= names
        else:
            late = names & there if what == "late" else set()
            quitting = names & there if what == "give up" else set()
            new = names - there if what == "come" else set()
            cards = [card(before, name, alive=late) for name in sorted(there - late - quitting)]
            if not cards:
                continue
            cards += [Card(fresh[name]) for name in sorted(new | quitting)]
            there |= new
            table = seats.meet(cards, counts=None if total is None else (total,), token="")
        assert table.epoch == before.epoch + 1
        assert table.token == TOKEN
        assert {each.id for each in table.nodes} == there
        assert [(chair.capacity, table.ranks_of(seat)) for seat, chair in enumerate(table.chairs)] == shape
        for seat, holder in enumerate(holders(before)):
            if holder in there and holder not in quitting:
                assert holders(table)[seat] == holder, "a living holder was moved"
        if before.keeper in there and before.keeper not in quitting:
            assert table.keeper == before.keeper
        for each in table.nodes:
            known = before.node(each.id)
            assert each.since == (known.since if known and each.id not in quitting else table.epoch)
        check(table, total)


def check(table, total):
    seated = [holder for holder in holders(table) if holder is not None]
    assert len(seated) == len(set(seated)), "two seats for one node"
    assert {*seated, table.keeper} <= {each.id for each in table.nodes}
    assert total is None or sum(chair.capacity for chair in table.chairs) == total
    free = [chair.capacity for chair in table.chairs if chair.holder is None]
    idle = [each.capacity for each in table.nodes if each.id not in seated]
    assert not any(size <= room for size in free for room in idle), "a seat is free, and a spare fits"
    for each in table.nodes:
        place = seats.seating(table, each.id)
        assert place.store == f"tcp://{table.keeper}:1"
        if place.seat is not None:
            assert table.ranks_of(place.seat)[0] == place.base_rank
    assert replace(table, nodes=()).node("a") is None
