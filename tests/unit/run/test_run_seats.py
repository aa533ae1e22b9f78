"""Who sits where: rules, and random losses and arrivals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.run.nodes import rank_assignment, slots
from multiworld.run.nodes.slots import Node, NodeRecord

TOKEN = "ab" * 16


def node(name, capacity=1, role="", since=0):
    return Node(name, f"host-{name}", "127.0.0.1", 1, 1, capacity, role, f"tcp://{name}:1", since)


def formed(*names, total=None, capacity=1):
    counts = None if total is None else (total,)
    return rank_assignment.form(
        [NodeRecord(node(name, capacity)) for name in names], counts=counts, token=TOKEN
    )


def holders(membership):
    return [slot.holder for slot in membership.slots]


def record(membership, name, alive=(), done=(), silent=()):
    """Of a node that sits at the table."""
    return NodeRecord(membership.node(name), membership, tuple(alive), tuple(done), tuple(silent))


def test_without_a_worlds_file_everyone_has_a_seat():
    membership = formed("a", "b", "c", capacity=4)
    assert holders(membership) == ["a", "b", "c"]
    assert [membership.ranks_of(slot) for slot in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert (membership.epoch, membership.token, membership.store_node) == (1, TOKEN, "a")
    assert {each.since for each in membership.nodes} == {1}


def test_a_worlds_file_says_how_many_seats_there_are():
    membership = formed("a", "b", "c", total=4, capacity=2)
    assert holders(membership) == ["a", "b"]
    assert rank_assignment.assignment(membership, "c").slot is None
    assert rank_assignment.assignment(membership, "c").world_size == 4


def sizes(membership):
    return {holder: slot.capacity for holder, slot in zip(holders(membership), membership.slots, strict=True)}


@pytest.mark.parametrize(
    ("total", "nodes", "each", "shares"),
    [(7, "ab", 4, [4, 3]), (7, "abc", 3, [3, 2, 2]), (9, "ab", 5, [5, 4]), (9, "abc", 8, [5, 4]), (8, "abc", 4, [4, 4]),
     (1, "ab", 8, [1])],
)  # fmt: skip
def test_workers_that_do_not_divide_are_dealt_evenly(total, nodes, each, shares):
    """The shipped worlds file has 7 workers; the page's example 9, on nodes of 8."""
    membership = formed(*nodes, total=total, capacity=each)
    assert [slot.capacity for slot in membership.slots] == shares
    assert all(slot.holder for slot in membership.slots)
    assert [rank_assignment.assignment(membership, name).size for name in nodes] == [
        *shares,
        *[0] * (len(nodes) - len(shares)),
    ]


@pytest.mark.parametrize("order", ["hab", "ahb", "abh"])
def test_a_hubs_node_of_one_worker_stands_beside_nodes_of_eight(order):
    """Wherever torch's rendezvous puts it: it has the hub, which is rank 0."""
    records = [NodeRecord(node(name, 1 if name == "h" else 8)) for name in order]
    membership = rank_assignment.form(records, counts=(1, 16), token=TOKEN)
    assert holders(membership) == ["h", "a", "b"]
    assert membership.ranks_of(0) == (0,)
    assert [rank_assignment.assignment(membership, name).size for name in "hab"] == [1, 8, 8]
    assert rank_assignment.vacant(membership) == ()


def test_a_spare_with_more_room_takes_the_seat_and_the_smallest_that_fits_comes_first():
    records = [
        NodeRecord(node(name, room)) for name, room in (("a", 2), ("b", 4), ("c", 8), ("d", 4), ("e", 1))
    ]
    membership = rank_assignment.form(records, counts=(6,), token=TOKEN)
    assert sizes(membership) == {"a": 2, "b": 4}
    after = rank_assignment.leave(membership, {"b"})
    assert sizes(after) == {"a": 2, "d": 4}
    after = rank_assignment.leave(after, {"a"})
    assert sizes(after) == {"c": 2, "d": 4}


def test_too_few_nodes_leave_seats_free():
    membership = formed("a", total=5, capacity=2)
    assert holders(membership) == ["a", None, None]
    assert [slot.capacity for slot in membership.slots] == [2, 2, 1]
    assert rank_assignment.vacant(membership) == (2, 3, 4)
    assert rank_assignment.assignment(membership, "a").vacant == (2, 3, 4)


def test_a_spare_that_fits_has_the_lost_nodes_seat():
    membership = rank_assignment.leave(formed("a", "b", "c", total=2), {"b"})
    assert holders(membership) == ["a", "c"]
    assert rank_assignment.assignment(membership, "c") == slots.Assignment(
        1, 1, 2, 2, "tcp://a:1", 1, 2, size=1
    )
    assert membership.epoch == 2


def test_a_spare_of_another_size_or_role_does_not_fit():
    records = [NodeRecord(node("a", 2)), NodeRecord(node("b", 2)), NodeRecord(node("c", 1))]
    assert holders(rank_assignment.leave(rank_assignment.form(records, counts=(4,), token=TOKEN), {"b"})) == [
        "a",
        None,
    ]
    records = [NodeRecord(node("a", 1, "x")), NodeRecord(node("b", 1, "y"))]
    membership = rank_assignment.leave(rank_assignment.form(records, counts=None, token=TOKEN), {"a"})
    membership = rank_assignment.form(
        [record(membership, "b"), NodeRecord(node("c", 1, "y"))], counts=None, token=""
    )
    assert holders(membership) == [None, "b"]


def test_ranks_of_roles_without_a_worlds_file():
    records = [NodeRecord(node("a", 2, "x")), NodeRecord(node("b", 1, "y")), NodeRecord(node("c", 3, "x"))]
    membership = rank_assignment.form(records, counts=None, token=TOKEN)
    worker_ranks = [rank_assignment.assignment(membership, name, ("m", 1)) for name in "abc"]
    assert [(each.base_rank, each.base_role_rank, each.role_world_size) for each in worker_ranks] == [
        (0, 0, 5), (2, 0, 1), (3, 2, 5),
    ]  # fmt: skip
    assert {each.master for each in worker_ranks} == {("m", 1)}


def test_who_comes_back_has_its_own_seat():
    membership = formed("a", "b", "c")
    membership = rank_assignment.leave(rank_assignment.leave(membership, {"b"}), {"c"})
    assert holders(membership) == ["a", None, None]
    membership = rank_assignment.form([NodeRecord(node("c")), record(membership, "a")], counts=None, token="")
    assert holders(membership) == ["a", None, "c"]
    assert membership.node("c").since == membership.epoch
    assert membership.node("a").since == 1


def test_a_node_that_comes_late_and_lives_keeps_its_seat():
    membership = formed("a", "b", "c", total=2)
    after = rank_assignment.form(
        [record(membership, "a", alive="b"), record(membership, "c")], counts=(2,), token=""
    )
    assert holders(after) == ["a", "b"]
    assert after.node("b").since == 1
    after = rank_assignment.form([record(membership, "a"), record(membership, "c")], counts=(2,), token="")
    assert holders(after) == ["a", "c"]


def test_a_silent_node_keeps_its_seat_in_a_rendezvous_without_it():
    """Its workers may run as long as one of the others has not waited long enough."""
    membership = formed("a", "b", "c", total=3)
    came = [record(membership, "a"), record(membership, "c", silent="b"), NodeRecord(node("d"))]
    after = rank_assignment.form(came, counts=(3,), token="")
    assert holders(after) == ["a", "b", "c"]
    assert after.node("b").since == 1, "its link is the one that was lost"
    assert holders(rank_assignment.leave(after, {"b"})) == ["a", "d", "c"]
    came = [record(membership, "a"), record(membership, "c"), NodeRecord(node("d"))]
    assert holders(rank_assignment.form(came, counts=(3,), token="")) == ["a", "d", "c"]
    came = [record(membership, "a", silent="b"), record(membership, "c"), NodeRecord(node("b"))]
    after = rank_assignment.form(came, counts=(3,), token="")
    assert after.node("b").since == after.epoch, "it gave its seat up, and is there"


def test_the_seat_of_a_node_that_was_removed_and_may_run_is_kept_in_a_rendezvous():
    without = rank_assignment.leave(formed("a", "b", "c", total=2), {"b"}, silent={"b"})
    assert without.done == ()
    came = [record(without, "a", silent="b"), record(without, "c"), NodeRecord(node("d"))]
    after = rank_assignment.form(came, counts=(2,), token="")
    assert holders(after) == ["a", "b"]
    assert after.node("b") is None
    assert holders(rank_assignment.leave(after, ())) == ["a", "c"]


def test_who_gave_up_its_seat_is_a_newcomer():
    membership = formed("a", "b")
    after = rank_assignment.form(
        [record(membership, "a", alive="b"), NodeRecord(node("b"))], counts=None, token=""
    )
    assert holders(after) == ["a", "b"]
    assert after.node("b").since == after.epoch


def test_the_newest_table_counts():
    old = formed("a", "b", "c", total=2)
    new = rank_assignment.leave(old, {"a"})
    after = rank_assignment.form(
        [NodeRecord(old.node("a"), old), record(new, "b"), record(new, "c")], counts=(2,), token=""
    )
    assert holders(after) == ["c", "b"]
    assert rank_assignment.assignment(after, "a").slot is None


def test_the_store_stays_where_it_is_as_long_as_its_node_lives():
    membership = formed("a", "b", "c")
    assert rank_assignment.leave(membership, {"c"}).store_node == "a"
    membership = rank_assignment.leave(membership, {"a"})
    assert membership.store_node == "b"
    assert (
        rank_assignment.form(
            [record(membership, "b"), record(membership, "c"), NodeRecord(node("a"))], counts=None, token=""
        ).store_node
        == "b"
    )


def test_a_seat_whose_workers_have_ended_is_not_given_away():
    membership = formed("a", "b", "c", total=2)
    after = rank_assignment.leave(membership, {"a"}, done={"a"})
    assert holders(after) == ["a", "b"]
    assert after.store_node == "b"
    assert rank_assignment.over(after, {"a"}, ()) is None
    assert rank_assignment.over(after, {"a", "b"}, ()) == ()
    again = rank_assignment.form([record(after, "b", done="a"), record(after, "c")], counts=(2,), token="")
    assert holders(again) == ["a", "b"]


def test_the_run_is_over_when_every_seat_is_done_or_free():
    membership = formed("a", "b", "c")
    assert rank_assignment.over(membership, {"a", "b"}, ()) is None
    assert rank_assignment.over(membership, {"a", "b"}, {"c"}) is None  # no node has judged it yet
    assert rank_assignment.over(rank_assignment.leave(membership, {"c"}), {"a", "b"}, ()) == (2,)
    assert rank_assignment.over(membership, {"a", "b", "c"}, {"c"}) == ()


def test_nodes_without_workers_do_not_keep_the_run_going_and_their_seats_are_free_once_they_leave():
    membership = formed("a", "b", "c")
    assert rank_assignment.over(membership, {"a"}, (), {"c"}) is None
    assert rank_assignment.over(membership, {"a"}, (), {"b", "c"}) == ()
    assert rank_assignment.over(membership, {"a"}, {"b"}, {"b", "c"}) is None, "it is not judged yet"
    assert rank_assignment.over(membership, (), (), {"a", "b", "c"}) is None, "they may start workers again"
    left = rank_assignment.leave(membership, {"c"}, {"a"})
    assert rank_assignment.vacant(left) == (2,)
    assert holders(rank_assignment.admit(left, [node("d")])) == ["a", "b", "d"]
    assert rank_assignment.over(rank_assignment.leave(membership, {"a", "c"}), (), (), {"b"}) is None
    assert rank_assignment.over(rank_assignment.leave(membership, {"a"}, {"a"}), {"a"}, (), {"b", "c"}) == ()


def test_a_spare_that_is_done_and_gone_had_the_free_seat():
    """Its table was on its way: the lost node's ranks have ended their work in its hands."""
    membership = formed("a", "b", "c", total=2)
    assert membership.slot_of("c") is None
    after = rank_assignment.leave(membership, {"b", "c"}, {"a", "c"})
    assert rank_assignment.over(after, {"a", "c"}, ()) == ()
    assert rank_assignment.over(rank_assignment.leave(membership, {"b", "c"}, {"a"}), {"a"}, ()) == (1,)


def test_late_nodes_are_let_in():
    membership = rank_assignment.leave(formed("a", "b", "c"), {"b"})
    after = rank_assignment.admit(membership, [node("d"), node("b")])
    assert holders(after) == ["a", "b", "c"]
    assert after.node("d").since == after.epoch
    again = rank_assignment.admit(after, [node("c")])  # it gave up and is back before any node saw that
    assert holders(again) == ["a", "b", "c"]
    assert again.node("c").since == again.epoch


def test_a_late_node_does_not_get_the_seat_of_one_that_is_done_and_gone():
    membership = rank_assignment.leave(formed("a", "b", "c"), {"b"}, silent={"b"})
    assert holders(membership) == ["a", "b", "c"]
    assert holders(rank_assignment.admit(membership, [node("d")], {"b"})) == ["a", "b", "c"]
    assert holders(rank_assignment.admit(membership, [node("b")], {"b"})) == ["a", "b", "c"]
    assert holders(rank_assignment.admit(membership, [node("d")])) == ["a", "d", "c"]


def test_nodes_that_come_later_learn_who_is_done_and_gone():
    """They have no link to it, and may be those that decide when the others have left."""
    gone = rank_assignment.leave(formed("a", "b", "c", total=2), {"b"}, {"a", "b"})
    assert gone.done == ("b",), "a is there, and says so itself"
    came = [record(gone, "a"), NodeRecord(node("d"))]
    formed_anew = rank_assignment.form(came, counts=(2,), token="")
    admitted = rank_assignment.admit(gone, [node("d")])
    for after in (formed_anew, admitted):
        assert after.done == ("b",)
        later = rank_assignment.leave(after, {"a"})
        assert holders(later) == ["c" if after.node("c") else "d", "b"]
        assert later.done == ("b",)
    told = rank_assignment.form([record(gone, "a", done="b"), NodeRecord(node("d"))], counts=(2,), token="")
    assert told == formed_anew


def test_a_node_that_is_back_says_itself_whether_it_is_done():
    gone = rank_assignment.leave(formed("a", "b", "c", total=2), {"b"}, {"b"})
    back = rank_assignment.admit(gone, [node("b")])
    assert (holders(back), back.done) == (["a", "b"], ())
    formed_anew = rank_assignment.form([record(gone, "a"), NodeRecord(node("b"))], counts=(2,), token="")
    assert (holders(formed_anew), formed_anew.done) == (["a", "b"], ())


def test_a_new_run_knows_of_none_that_is_done():
    new = rank_assignment.form([NodeRecord(node("a"), done=("b",))], counts=(2,), token=TOKEN)
    assert (holders(new), new.done) == (["a", None], ())


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
    assert rank_assignment.cut_off(formed(*nodes), "a", lost, answers=answers, outside=outside) is expected


def test_who_is_done_is_not_cut_off_by_others_that_finished_and_left():
    """a was cut off, c took its seat, and b and c are done; c has left before b heard of its seat."""
    membership, lost, done = formed("a", "b", "c", total=2), {"a": "unreachable", "c": "left"}, {"b", "c"}
    assert rank_assignment.cut_off(membership, "b", lost, {"c"}, answers=False, outside=False)
    assert not rank_assignment.cut_off(membership, "b", lost, done, answers=False, outside=False)
    after = rank_assignment.leave(membership, lost, done)
    assert rank_assignment.over(after, done, ()) == ()


def test_both_sides_of_a_cut_never_go_on():
    """Whatever the cut, and wherever the store is: at most one side keeps its seats without a judge."""
    for size in range(2, 7):
        names = "abcdef"[:size]
        for cut in range(1, size):
            left, right = names[:cut], names[cut:]
            for answers in (left, right, ""):
                stays = [
                    not rank_assignment.cut_off(
                        formed(*names), side[0], dict.fromkeys(other, "unreachable"),
                        answers=side == answers, outside=False,
                    )
                    for side, other in ((left, right), (right, left))
                ]  # fmt: skip
                assert sum(stays) <= 1, (left, right, answers)


def test_the_first_that_lives_decides():
    membership = formed("a", "b", "c")
    assert rank_assignment.leader(membership, ()) == "a"
    assert rank_assignment.leader(membership, {"a": "crashed"}) == "b"
    assert rank_assignment.leader(membership, {"a", "b", "c"}) is None


def test_records_survive_json():
    membership = formed("a", "b", "c", total=2)
    assert slots.membership_from(json.loads(json.dumps(slots.to_json(membership)))) == membership
    for each in (record(membership, "a", alive="bc", done="b"), NodeRecord(node("x"))):
        assert slots.record_from(json.loads(json.dumps(slots.to_json(each)))) == each
    assert slots.record_from(
        json.loads(json.dumps(slots.to_json(record(membership, "a", silent="c"))))
    ) == record(membership, "a", silent="c")
    older = slots.to_json(record(membership, "a", silent="c"))
    del older["silent"]
    assert slots.record_from(older) == record(membership, "a")
    gone = rank_assignment.leave(membership, {"b"}, {"b"})
    older = json.loads(json.dumps(slots.to_json(gone)))
    assert slots.membership_from(older) == gone
    del older["done"]
    assert slots.membership_from(older) == replace(gone, done=())
    with pytest.raises((KeyError, TypeError, ValueError)):
        slots.membership_from({"epoch": 1})


NAMES = "abcdefgh"
CAPACITIES = st.sampled_from([1, 1, 1, 2])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("lose"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=3)),
        st.tuples(st.just("come"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=3)),
        st.tuples(st.just("admit"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=2)),
        st.tuples(st.just("give up"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=1)),
        st.tuples(st.just("late"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=2)),
        st.tuples(st.just("silent"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=2)),
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
    membership = rank_assignment.form(
        [NodeRecord(fresh[name]) for name in sorted(first)],
        counts=None if total is None else (total,),
        token=TOKEN,
    )
    shape = [(slot.capacity, membership.ranks_of(number)) for number, slot in enumerate(membership.slots)]
    check(membership, total)
    there = set(first)
    for what, names in steps:
        before = membership
        quitting: set[str] = set()
        if what == "lose":
            quitting = names & there
            if quitting == there:
                continue
            there -= quitting
            membership = rank_assignment.leave(membership, quitting)
        elif what == "admit":
            membership = rank_assignment.admit(membership, [fresh[name] for name in sorted(names)])
            quitting = names & there  # they would not ask if they had not given up
            there |= names
        else:
            late = names & there if what in {"late", "silent"} else set()
            quitting = names & there if what == "give up" else set()
            new = names - there if what == "come" else set()
            records = [
                record(before, name, **{"silent" if what == "silent" else "alive": late})
                for name in sorted(there - late - quitting)
            ]
            if not records:
                continue
            records += [NodeRecord(fresh[name]) for name in sorted(new | quitting)]
            there |= new
            membership = rank_assignment.form(records, counts=None if total is None else (total,), token="")
        assert membership.epoch == before.epoch + 1
        assert membership.token == TOKEN
        assert {each.id for each in membership.nodes} == there
        assert [
            (slot.capacity, membership.ranks_of(number)) for number, slot in enumerate(membership.slots)
        ] == shape
        for slot, holder in enumerate(holders(before)):
            if holder in there and holder not in quitting:
                assert holders(membership)[slot] == holder, "a living holder was moved"
        if before.store_node in there and before.store_node not in quitting:
            assert membership.store_node == before.store_node
        for each in membership.nodes:
            known = before.node(each.id)
            assert each.since == (known.since if known and each.id not in quitting else membership.epoch)
        check(membership, total)


def check(membership, total):
    seated = [holder for holder in holders(membership) if holder is not None]
    assert len(seated) == len(set(seated)), "two seats for one node"
    assert {*seated, membership.store_node} <= {each.id for each in membership.nodes}
    assert total is None or sum(slot.capacity for slot in membership.slots) == total
    free = [slot.capacity for slot in membership.slots if slot.holder is None]
    idle = [each.capacity for each in membership.nodes if each.id not in seated]
    assert not any(size <= room for size in free for room in idle), "a seat is free, and a spare fits"
    for each in membership.nodes:
        place = rank_assignment.assignment(membership, each.id)
        assert place.store == f"tcp://{membership.store_node}:1"
        if place.slot is not None:
            assert membership.ranks_of(place.slot)[0] == place.base_rank
    assert replace(membership, nodes=()).node("a") is None
