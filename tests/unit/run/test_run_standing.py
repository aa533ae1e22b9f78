"""What a launcher knows of the run's nodes, and of its own place among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_run_seats import formed, node

from multiworld.run.nodes import rank_assignment
from multiworld.run.nodes.standing import Standing

TWO = formed("a", "b")


def standing(membership=TWO, me="a"):
    found = Standing(me)
    found.master = ("h", 1)
    assert found.adopt(membership) is not None
    return found


def test_the_first_membership():
    found = Standing("a")
    assert (found.membership, found.epoch, found.assignment, found.done) == (None, 0, None, False)
    found.master = ("h", 1)
    changed = found.adopt(TWO)
    assert (found.membership, found.epoch) == (TWO, 1)
    assert found.assignment == changed.assignment == rank_assignment.assignment(TWO, "a", ("h", 1))
    assert (changed.old, changed.before, changed.gone, changed.again) == (None, None, (), False)
    assert changed.joined == ((TWO.node("b"), 1),)


def test_one_without_this_node_changes_nothing():
    found = standing()
    before = vars(found).copy()
    assert found.adopt(rank_assignment.leave(TWO, {"a"})) is None
    assert vars(found) == before


def test_who_has_gone_and_who_has_come():
    found, first = standing(), TWO
    second = rank_assignment.admit(rank_assignment.leave(first, {"b"}), [node("c")])
    changed = found.adopt(second)
    assert changed.old is first
    assert changed.before == rank_assignment.assignment(first, "a", ("h", 1))
    assert changed.gone == (first.node("b"),)
    assert changed.joined == ((second.node("c"), 1),)
    third = replace(second, epoch=second.epoch + 1)
    changed = found.adopt(third)
    assert (changed.gone, changed.joined) == ((), ())
    again = rank_assignment.admit(third, [node("c")])
    assert found.adopt(again).joined == ((again.node("c"), 1),), "it has left, and come back"


def test_a_node_that_takes_a_seat_has_come():
    three = formed("a", "b", "c", total=2)
    found = standing(three)
    after = rank_assignment.leave(three, {"b"})
    assert after.slot_of("c") == 1
    assert found.adopt(after).joined == ((after.node("c"), 1),)


@pytest.mark.parametrize("holder", ["c", None])
def test_a_node_whose_seat_was_given_away_is_done_no_more(holder):
    found = standing()
    found.finished = {"b", "gone"}
    slots = (TWO.slots[0], replace(TWO.slots[1], holder=holder))
    found.adopt(replace(TWO, epoch=2, slots=slots))
    assert found.finished == {"gone"}
    found.adopt(replace(TWO, epoch=3, done=("x",)))
    assert found.finished == {"gone", "x"}


def test_its_own_work_is_done_again_where_another_node_has_its_seat():
    found = standing()
    found.finished = {"a", "b"}
    assert found.done
    assert not found.adopt(replace(TWO, epoch=2)).again
    slots = (replace(TWO.slots[0], holder="b"), replace(TWO.slots[1], holder="a"))
    changed = found.adopt(replace(TWO, epoch=3, slots=slots))
    assert changed.again
    assert not found.done
    assert not found.adopt(replace(TWO, epoch=4)).again, "it was not done"


def test_a_seat_is_lost_once_and_not_once_its_work_is_done():
    found = Standing("a")
    assert found.lose_seat() is None
    assert found.leave() is None
    found = standing()
    assert found.leave() is TWO
    assert found.membership is None
    assert found.epoch == 1
    before = found.assignment
    assert found.lose_seat() == found.assignment == before.without_slot()
    assert found.lose_seat() is None
    found = standing()
    found.finished.add("a")
    assert found.lose_seat() is None
    assert found.assignment.slot == 0


def test_the_run_is_over_for_a_node_once_its_own_work_is_done():
    found = standing()
    assert found.over(TWO, ()) is None
    found.finished = {"a", "b"}
    assert found.over(TWO, ()) == ()
    away = replace(TWO, slots=(TWO.slots[0], replace(TWO.slots[1], holder=None)))
    found.finished = {"a"}
    assert found.over(away, ()) == (1,)
    assert found.over(away, {"b"}) is None
    others = replace(TWO, slots=(replace(TWO.slots[0], holder="b"), replace(TWO.slots[1], holder=None)))
    found.finished = {"b"}
    assert found.over(others, ()) == (1,), "it has no seat"
    assert found.over(replace(TWO, slots=(TWO.slots[0],)), ()) is None


def test_the_run_is_over_for_a_node_without_workers_once_the_others_are_done_or_have_none():
    found, three = standing(), formed("a", "b", "c")
    found.idle = True
    assert found.over(TWO, ()) is None
    found.finished = {"b"}
    assert found.over(TWO, ()) == ()
    assert found.over(three, ()) is None
    assert found.over(three, (), {"c"}) == ()
    found.idle = False
    assert found.over(three, (), {"c"}) is None
    found.finished = {"a", "b"}
    assert found.over(three, (), {"c"}) is None, "the other one tells when it is done with it"


@pytest.mark.parametrize("loses", [True, False], ids=["lost", "another one"])
def test_a_node_is_not_idle_in_another_seat(loses):
    found = standing()
    found.idle = True
    found.adopt(replace(TWO, epoch=2))
    assert found.idle, "it is the same"
    if loses:
        assert found.lose_seat() is not None
    else:
        slots = (replace(TWO.slots[0], holder="b"), replace(TWO.slots[1], holder="a"))
        assert not found.adopt(replace(TWO, epoch=3, slots=slots)).again
    assert not found.idle


def test_a_node_that_is_left_alone_without_workers():
    found, alone = standing(), rank_assignment.leave(TWO, {"b"})
    assert found.stranded(alone) == ()
    found.idle = True
    assert found.stranded(TWO) == ()
    assert found.stranded(alone) == (1,)
