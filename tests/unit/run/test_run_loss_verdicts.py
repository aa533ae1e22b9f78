"""What follows from the loss of nodes."""

from __future__ import annotations

import pytest
from test_run_seats import formed

from multiworld.run.nodes import rank_assignment
from multiworld.run.nodes.loss_verdicts import CutOff, LossVerdicts
from multiworld.run.nodes.losses import FENCE
from multiworld.run.nodes.standing import Standing

THREE = formed("a", "b", "c")


def scene(membership=THREE, *, outside=False, me="a"):
    verdicts, standing = LossVerdicts(1.5, lambda _: [], outside=outside), Standing(me)
    standing.adopt(membership)
    verdicts.follow(None, membership, set(), 0.0)
    return verdicts, standing


def judged(verdicts, standing, now, *, unmade=(), answers=True):
    return verdicts.judge(standing, standing.membership, unmade, now, answers=answers)


def test_nothing_is_lost():
    assert judged(*scene(), 1e6) is None


def test_the_leader_gives_the_seat_of_a_node_that_has_crashed_away():
    verdicts, standing = scene()
    verdicts.losses.add("c", 1, "crashed", 100.0)
    assert judged(verdicts, standing, 99.9) is None
    assert judged(verdicts, standing, 100.0) == rank_assignment.leave(THREE, {"c"})


def test_other_nodes_leave_it_to_the_leader_for_a_while():
    verdicts, standing = scene(me="b")
    verdicts.losses.add("c", 1, "crashed", 100.0)
    assert judged(verdicts, standing, 100.0) is None
    assert judged(verdicts, standing, 110.0) == rank_assignment.leave(THREE, {"c"})


@pytest.mark.parametrize("answers", [True, False])
def test_a_node_that_sees_a_minority_is_cut_off(answers):
    verdicts, standing = scene()
    verdicts.losses.add("b", 1, "hung", 100.0)
    assert isinstance(judged(verdicts, standing, 100.0, unmade=["c"], answers=answers), CutOff)
    assert not isinstance(judged(verdicts, standing, 100.0, answers=answers), CutOff)


def test_a_store_outside_arbitrates():
    verdicts, standing = scene(outside=True)
    verdicts.losses.add("b", 1, "hung", 100.0)
    assert judged(verdicts, standing, 100.0, unmade=["c"]) is None


def test_a_silent_node_keeps_its_seat_for_a_while_in_a_store_outside():
    verdicts, standing = scene(outside=True)
    verdicts.losses.add("c", 1, "hung", 100.0)
    after = judged(verdicts, standing, 1000.0)
    assert after.node("c") is None
    assert after.slot_of("c") == 2
    standing.adopt(after)
    verdicts.follow(THREE, after, set(), 1000.0)
    assert verdicts.silent(["b"], 1000.0) == ("b", "c")
    assert judged(verdicts, standing, 1000.0 + FENCE / 2) is None
    assert judged(verdicts, standing, 1000.0 + FENCE).slots[2].holder is None
    assert verdicts.silent_holders(after, 1000.0 + FENCE, answers=True) == set()
    assert verdicts.silent_holders(after, 1000.0 + FENCE, answers=False) == {"c"}


def test_a_spare_takes_a_silent_nodes_seat_only_where_others_have_lost_it_too():
    spares = formed("a", "b", "c", "d", "e", total=2)
    verdicts, standing = scene(spares, me="c")
    verdicts.losses.add("a", 1, "hung", 100.0)
    assert judged(verdicts, standing, 1000.0, answers=False) is None, "it asks them first"
    verdicts.losses.add("b", 1, "crashed", 100.0)
    after = judged(verdicts, standing, 1000.0, answers=False)
    assert after == rank_assignment.leave(spares, {"b"})
    assert after.slot_of("c") == 1
