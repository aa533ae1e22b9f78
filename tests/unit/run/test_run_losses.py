"""When the seats of lost nodes may be given away."""

from __future__ import annotations

import pytest
from test_run_seats import formed

from multiworld.run.nodes import rank_assignment
from multiworld.run.nodes.losses import FENCE, STORE_CALL, Fence, Losses
from multiworld.run.workers import orphan_reaper

FOUR = formed("a", "b", "c", "d")
HANG = 1.5


def lost(*nodes, cause="crashed", at=100.0, hang_timeout=HANG):
    found = Losses(hang_timeout)
    for each in nodes:
        found.add(each, 1, cause, at)
    return found


def test_a_node_that_is_gone_for_sure_is_replaced_at_once_by_the_leader():
    for cause in ("crashed", "left"):
        assert lost("b", cause=cause).due(FOUR, decides=True, answers=True) == 100.0


@pytest.mark.parametrize(("hang_timeout", "wait"), [(1.5, 6.5), (10.0, 20.0)])
def test_one_that_may_live_has_time_to_end_its_workers(hang_timeout, wait):
    for cause in ("hung", "unreachable"):
        found = lost("b", cause=cause, hang_timeout=hang_timeout)
        assert found.due(FOUR, decides=True, answers=True) == 100.0 + wait


@pytest.mark.parametrize("hang_timeout", [0.3, 1.0, 2.0, 5.0, 60.0])
def test_a_node_cut_off_while_it_connects_knows_it_before_its_seat_is_given_away(hang_timeout):
    """Cut off at 100.0, in the moment in which it begins to connect with a second node."""
    noticed = 100.0 + Losses(hang_timeout).connects
    others = lost("b", cause="unreachable", at=100.0 + hang_timeout, hang_timeout=hang_timeout)
    assert noticed + STORE_CALL <= others.due(FOUR, decides=True, answers=True)


@pytest.mark.parametrize("hang_timeout", [0.3, 1.0, 2.0, 5.0, 60.0])
def test_workers_of_a_launcher_that_stands_still_end_before_their_seat_is_given_away(hang_timeout):
    """It stops at 100.0, in which moment its orphan reaper has heard of it, and the others half a timeout ago."""
    ended = 100.0 + Losses(hang_timeout).connects + 2 * orphan_reaper.WAIT_SWITCHED
    others = lost("b", cause="hung", at=100.0 + hang_timeout / 2, hang_timeout=hang_timeout)
    assert ended + 1.0 <= others.due(FOUR, decides=True, answers=True)


def test_the_last_loss_counts():
    found = lost("b")
    found.add("c", 1, "hung", 90.0)
    assert found.due(formed("a", "b", "c", "d", "e"), decides=True, answers=True) == 100.0
    found.add("c", 1, "hung", 99.0)
    assert found.due(formed("a", "b", "c", "d", "e"), decides=True, answers=True) == 105.5


def test_half_of_the_nodes_lets_a_majority_decide_first():
    assert lost("b", "c").due(FOUR, decides=True, answers=True) == 101.0
    assert lost("b", "c").due(formed("a", "b", "c", "d", "e"), decides=True, answers=True) == 100.0


def test_others_decide_where_the_leader_does_not_and_all_where_no_store_tells():
    found = lost("b")
    assert found.due(FOUR, decides=False, answers=True) == 110.0
    for decides in (False, True):
        assert found.due(FOUR, decides=decides, answers=False) == 101.0


def test_a_loss_is_of_a_link():
    found = lost("b", "c", cause="hung")
    found.follow({("a", 1), ("b", 2), ("c", 1)})  # b was admitted again; c is listed by mistake
    assert found.causes == {"c": "hung"}
    found.add("b", 2, "left", 200.0)
    assert found.causes == {"b": "left", "c": "hung"}
    found.follow({("a", 1), ("b", 2)})
    assert found.causes == {"b": "left"}
    found.forget()
    assert not found.causes
    found.follow({("a", 1), ("b", 2)})
    assert found.causes == {"b": "left"}, "it was lost all the same"


def test_which_nodes_may_still_run():
    """All but those that are gone for sure: a rendezvous in which one of these is missing keeps its seat."""
    found = lost("b", cause="hung", hang_timeout=1.5)
    found.add("c", 1, "crashed", 100.0)
    found.add("d", 1, "left", 100.0)
    assert found.may_run("abcd", 106.4) == ("a", "b")
    assert found.may_run("abcd", 106.5) == ("a",)
    found.follow({("b", 2), ("c", 2)})  # both were admitted again
    assert found.may_run("bc", 106.5) == ("b", "c")


def test_only_silent_nodes_may_read_their_removal_late():
    found = lost("b", cause="hung")
    found.add("c", 1, "crashed", 100.0)
    found.add("d", 1, "left", 100.0)
    found.add("a", 1, "failed", 100.0)
    assert found.silent == {"a", "b"}


def test_the_seat_of_a_node_that_reads_its_removal_late_is_kept():
    assert FENCE > STORE_CALL
    membership, fence = formed("a", "b", "c", "d", total=3), Fence()
    fence.follow(None, membership, 90.0)
    assert (fence.kept(90.0), fence.over(200.0)) == (set(), False)
    without = rank_assignment.leave(membership, {"b"}, silent={"b"})
    assert [slot.holder for slot in without.slots] == ["a", "b", "c"]
    fence.follow(membership, without, 100.0)
    fence.follow(without, rank_assignment.admit(without, formed("e").nodes, silent={"b"}), 101.0)
    assert fence.kept(100.0 + FENCE - 0.01) == fence.kept() == {"b"}
    assert not fence.over(100.0 + FENCE - 0.01)
    assert fence.kept(100.0 + FENCE) == set()
    assert fence.over(100.0 + FENCE)
    assert not fence.over(100.0 + FENCE, done={"b"})
    fence.follow(without, rank_assignment.leave(without, ()), 110.0)
    assert fence.kept() == set()


def test_a_seat_that_was_kept_for_another_reason_is_not_given_away():
    """Its node was done and left before this one came, which therefore does not know it."""
    without, fence = rank_assignment.leave(formed("a", "b"), {"b"}, {"b"}), Fence()
    fence.follow(None, without, 100.0)
    assert not fence.over(200.0)


def test_a_node_that_comes_back_before_its_seat_is_given_away_has_it():
    fence, membership = Fence(), formed("a", "b", "c", total=2)
    without = rank_assignment.leave(membership, {"b"}, silent={"b"})
    fence.follow(membership, without, 100.0)
    back = rank_assignment.admit(without, [membership.node("b")], silent={"b"})
    assert [slot.holder for slot in back.slots] == ["a", "b"]
    fence.follow(without, back, 101.0)
    assert fence.kept() == set()
