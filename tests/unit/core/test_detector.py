from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.peerkit import ANSWERS, SILENT_HOST, process, rosters

from multiworld._core.liveness.detector import (
    GRACE,
    SIGN_GRACE,
    ConnectionEnd,
    Detector,
    Loss,
    Probe,
    Verdict,
    world_id,
)
from multiworld.events import Cause


def watching(*groups, own=1, now=0.0):
    detector = Detector(process(own))
    for group in groups:
        detector.add(next(each for each in group if each.members[each.rank].process == process(own)))
        for member in group[0].members:
            if member.process != process(own):
                detector.connected(member.process, now)
    return detector


def the(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1
    return verdicts[0]


def test_a_world_that_needs_more_signs_of_life_waits_for_them_from_its_beginning():
    detector = watching(rosters("long", hang=30.0))  # there they come every second
    detector.heard(process(2), 10.0)
    detector.add(rosters("short", hang=0.5)[0], 10.9)
    assert detector.settle(11.3, {process(2): ANSWERS}) == []
    verdict = the(detector.settle(11.5, {process(2): ANSWERS}))
    assert (verdict.world, verdict.breakage.cause) == (("short/1", 0), Cause.HUNG)
    # One that needs fewer changes nothing.
    detector = watching(rosters("short", hang=0.5))
    detector.heard(process(2), 10.0)
    detector.add(rosters("long", hang=30.0)[0], 10.4)
    assert the(detector.settle(10.6, {process(2): ANSWERS})).world == ("short/1", 0)


def test_several_that_ended_together_are_one_verdict_per_world():
    detector = watching(rosters("a", (1, 2, 3, 4)), rosters("b", (1, 3)), rosters("c", (1, 2)))
    detector.closed(process(3), ConnectionEnd.LOST)
    detector.closed(process(4), ConnectionEnd.LOST)
    assert detector.wake() == -math.inf
    first, second = detector.settle(1.0, {})
    assert (first.world, first.breakage.cause, first.breakage.ranks) == (("a/1", 0), Cause.CRASHED, (2, 3))
    assert first.tell == (1,)
    assert "ranks 2 (pid 1003 on host3), 3 (pid 1004 on host4)" in first.breakage.detail
    assert (second.world, second.breakage.ranks, second.tell) == (("b/1", 0), (1,), ())
    assert detector.settle(2.0, {}) == []


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        (ConnectionEnd.LOST, Cause.CRASHED), (ConnectionEnd.DEAD, Cause.UNREACHABLE), (ConnectionEnd.GARBAGE, Cause.FAILED),
        (ConnectionEnd.STUCK, Cause.HUNG),
    ],
)  # fmt: skip
def test_how_a_connection_ended_is_the_cause(ending, cause):
    detector = watching(rosters("a", (1, 2)))
    detector.closed(process(2), ending)
    assert the(detector.settle(1.0, {})).breakage.cause is cause


def test_a_crash_explains_what_ended_otherwise_at_the_same_time():
    detector = watching(rosters("a", (1, 2, 3)))
    detector.closed(process(2), ConnectionEnd.DEAD)
    detector.closed(process(3), ConnectionEnd.LOST)
    assert the(detector.settle(1.0, {})).breakage.ranks == (2,)
    detector = watching(rosters("a", (1, 2, 3)))
    detector.closed(process(2), ConnectionEnd.DEAD)
    detector.closed(process(3), ConnectionEnd.GARBAGE)
    assert the(detector.settle(1.0, {})).breakage.ranks == (1,)


def test_silence_takes_as_long_as_each_world_says():
    detector = watching(rosters("a", (1, 2), hang=1.0), rosters("b", (1, 2), hang=3.0))
    assert detector.shortest(process(2)) == 1.0
    assert detector.wake() == 1.0
    assert detector.suspects(0.99) == ()
    assert detector.settle(0.99, {}) == []
    assert detector.suspects(1.0) == (process(2),)
    found = the(detector.settle(1.0, {process(2): ANSWERS}))
    assert (found.world, found.breakage.cause, found.tell) == (("a/1", 0), Cause.HUNG, (1,))
    assert detector.wake() == 3.0
    assert the(detector.settle(3.0, {process(2): SILENT_HOST})).breakage.cause is Cause.UNREACHABLE
    assert detector.wake() == math.inf


def test_without_a_probe_the_host_counts_as_answering():
    detector = watching(rosters("a", (1, 2), hang=1.0))
    assert the(detector.settle(1.5, {})).breakage.cause is Cause.HUNG


def test_what_was_acknowledged_lately_is_a_host_that_answers():
    detector = watching(rosters("a", (1, 2), hang=1.0))
    assert the(detector.settle(1.0, {process(2): Probe(True, 0.4)})).breakage.cause is Cause.HUNG


def test_a_host_that_is_away_is_named_before_a_process_that_hangs():
    detector = watching(rosters("a", (1, 2, 3), hang=1.0))
    found = the(detector.settle(1.0, {process(2): ANSWERS, process(3): SILENT_HOST}))
    assert (found.breakage.cause, found.breakage.ranks) == (Cause.UNREACHABLE, (2,))


def test_a_sign_of_life_counts_for_all_worlds():
    detector = watching(rosters("a", (1, 2), hang=1.0), rosters("b", (1, 2), hang=1.5))
    detector.heard(process(2), 0.9)
    assert detector.settle(1.8, {}) == []
    detector.heard(process(9), 0.9)
    assert detector.shortest(process(9)) == math.inf


def test_a_stall_gives_time_for_two_beats_and_once_only():
    detector = watching(rosters("a", (1, 2), hang=1.0), rosters("b", (1, 3), hang=1.0))
    detector.disconnected(process(3))
    detector.stalled(5.0, 5.0)
    assert detector.wake() == pytest.approx(5.4)
    detector.stalled(0.3, 5.1)
    assert detector.wake() == pytest.approx(5.4)
    now = 5.4
    for _ in range(100):
        detector.stalled(0.25, now)
        now += 0.1
        if detector.settle(now, {}):
            break
    assert now == pytest.approx(6.1, abs=0.2)


def test_a_stall_gives_as_much_as_it_took_and_a_short_one_nothing():
    detector = watching(rosters("a", (1, 2), hang=1.0))
    detector.stalled(0.2, 0.995)
    assert detector.wake() == 1.0
    detector.stalled(0.3, 0.9)
    assert detector.wake() == pytest.approx(1.2)
    detector.heard(process(2), 1.0)
    assert detector.settle(1.2, {}) == []
    assert detector.wake() == pytest.approx(2.0)


def test_left_names_who_left():
    detector = watching(rosters("a", (1, 2, 3)))
    detector.left(("a/1", 0), 2)
    found = the(detector.settle(1.0, {}))
    assert (found.breakage.cause, found.breakage.ranks, found.tell) == (Cause.LEFT, (2,), (1,))
    detector.left(("a/1", 0), 1)
    assert detector.settle(1.0, {}) == []


def test_a_failure_waits_for_a_better_reason():
    detector = watching(rosters("a", (1, 2, 3)), rosters("b", (1, 2, 3), hang=0.6))
    detector.failed(("a/1", 0), (1, 1), "a failed", 1.0)
    detector.failed(("a/1", 0), (2,), "again", 1.0)
    detector.failed(("b/1", 0), (), "b failed", 0.1)
    for number in (2, 3):
        detector.heard(process(number), 0.2)
    assert detector.wake() == pytest.approx(0.4)
    assert the(detector.settle(0.4, {})).breakage.detail == "b failed"
    for number in (2, 3):
        detector.heard(process(number), 1.1)
    detector.silence_due.changed()  # that they were heard has put off what is looked at
    assert detector.wake() == pytest.approx(1.0 + GRACE)
    assert detector.settle(1.0 + GRACE - 0.01, {}) == []
    found = the(detector.settle(1.0 + GRACE, {}))
    assert (found.breakage.cause, found.breakage.ranks, found.breakage.detail) == (
        Cause.FAILED,
        (1,),
        "a failed",
    )


def test_a_crash_in_the_grace_wins():
    detector = watching(rosters("a", (1, 2, 3)))
    detector.failed(("a/1", 0), (1,), "closed by peer", 1.0)
    detector.closed(process(3), ConnectionEnd.LOST)
    found = the(detector.settle(1.1, {}))
    assert (found.breakage.cause, found.breakage.ranks) == (Cause.CRASHED, (2,))
    assert detector.settle(2.0, {}) == []


def test_a_failure_waits_for_a_sign_of_life_from_each_member():
    detector = watching(rosters("a", (1, 2, 3)))
    detector.heard(process(3), 1.0)  # it may have died since
    detector.failed(("a/1", 0), (1,), "closed by peer", 1.0)
    detector.heard(process(2), 1.1)
    assert detector.settle(1.0 + GRACE, {}) == []
    assert detector.wake() == pytest.approx(1.0 + SIGN_GRACE)
    detector.closed(process(3), ConnectionEnd.LOST)
    found = the(detector.settle(3.0, {}))
    assert (found.breakage.cause, found.breakage.ranks) == (Cause.CRASHED, (2,))


def test_a_sign_of_life_or_a_goodbye_ends_the_wait_for_a_better_reason():
    for end in (lambda each: each.heard(process(3), 2.0), lambda each: each.disconnected(process(3))):
        detector = watching(rosters("a", (1, 2, 3)))
        detector.failed(("a/1", 0), (), "closed by peer", 1.0)
        detector.heard(process(2), 1.1)
        end(detector)
        assert the(detector.settle(2.0, {})).breakage.cause is Cause.FAILED


@pytest.mark.parametrize("hang", [9.0, 1.0])
def test_the_wait_for_a_sign_of_life_ends(hang):
    detector = watching(rosters("a", (1, 2, 3), hang=hang))
    for number in (2, 3):
        detector.heard(process(number), 0.9)
    detector.failed(("a/1", 0), (), "closed by peer", 1.0)
    detector.heard(process(2), 1.1)
    assert detector.settle(1.0 + min(SIGN_GRACE, 0.9 * hang) - 0.01, {}) == []
    found = the(detector.settle(1.0 + min(SIGN_GRACE, hang), {}))
    # Where the silence itself is a verdict first, it is that one.
    assert found.breakage.cause is (Cause.FAILED if hang > SIGN_GRACE else Cause.HUNG)


def test_of_what_was_told_together_a_failure_is_the_poorest():
    detector = watching(rosters("a", (1, 2, 3)))
    detector.told(("a/1", 0), Cause.FAILED, (1,), "failed")
    detector.told(("a/1", 0), Cause.HUNG, (2, 2, 77), "hung")
    found = the(detector.settle(1.0, {}))
    assert (found.breakage.cause, found.breakage.ranks) == (Cause.HUNG, (2,))
    detector.told(("a/1", 0), Cause.HUNG, (2,), "late")
    detector.told(("zz/1", 0), Cause.HUNG, (2,), "unknown")
    assert detector.settle(1.0, {}) == []


def test_a_failure_that_was_told_is_a_verdict_at_once():
    detector = watching(rosters("a", (1, 2, 3)))
    detector.told(("a/1", 0), Cause.FAILED, (1,), "failed")
    assert the(detector.settle(1.0, {})).breakage.cause is Cause.FAILED


def test_the_others_of_a_broken_world_are_judged_on():
    """A host that is lost is silent with all its members, but not for the same time."""
    detector = watching(rosters("a", (1, 2, 3, 4, 5), hang=2.0))
    detector.heard(process(2), 0.5)
    detector.heard(process(4), 0.5)
    every = {process(each): SILENT_HOST for each in range(2, 6)}
    verdict = the(detector.settle(2.0, every))
    assert (verdict.breakage.cause, verdict.breakage.ranks) == (Cause.UNREACHABLE, (2, 4))
    assert not detector.watches(verdict.world)
    assert detector.losses() == []
    detector.heard(process(2), 2.1)
    assert detector.wake() == 2.5
    assert detector.settle(2.5, every) == []
    assert detector.losses() == [Loss(("a/1", 0), (3,))]
    detector.closed(process(2), ConnectionEnd.LOST)
    detector.closed(process(5), ConnectionEnd.LOST)
    assert detector.settle(2.6, {}) == []
    assert detector.losses() == [Loss(("a/1", 0), (1,))], "the other one is in the verdict"
    assert detector.wake() == math.inf


def test_what_a_crash_explains_is_lost_too():
    detector = watching(rosters("a", (1, 2, 3, 4)))
    detector.closed(process(2), ConnectionEnd.DEAD)
    detector.closed(process(3), ConnectionEnd.LOST)
    detector.closed(process(4), ConnectionEnd.GARBAGE)  # it lives
    assert the(detector.settle(1.0, {})).breakage.ranks == (2,)
    assert detector.losses() == [Loss(("a/1", 0), (1,))]


def test_nothing_more_is_said_of_a_broken_world():
    detector = watching(rosters("a", (1, 2, 3)))
    detector.left(("a/1", 0), 1)
    assert the(detector.settle(1.0, {})).breakage.cause is Cause.LEFT
    detector.left(("a/1", 0), 2)
    detector.fell(("a/1", 0), 2, "fell")
    detector.told(("a/1", 0), Cause.HUNG, (2,), "told")
    detector.failed(("a/1", 0), (2,), "failed", 1.0)
    assert detector.settle(2.0, {}) == []
    detector.closed(process(2), ConnectionEnd.LOST)
    assert detector.settle(2.0, {}) == []
    assert detector.losses() == [], "it has left"


def test_a_member_is_judged_until_all_its_ranks_are():
    group = rosters("a", (1, 2, 2, 3), hang=2.0)
    detector = watching(group)
    detector.left(world_id(group[0]), 1)
    the(detector.settle(1.0, {}))
    assert detector.shortest(process(2)) == 2.0
    detector.settle(2.0, {process(2): ANSWERS, process(3): ANSWERS})
    assert [each.ranks for each in detector.losses()] == [(2, 3)]
    assert detector.shortest(process(2)) == math.inf


def test_worlds_that_are_gone_give_no_verdict():
    detector = watching(rosters("a", (1, 2)), rosters("b", (1, 2), hang=9.0))
    assert detector.watches(("a/1", 0))
    detector.left(("a/1", 0), 1)
    detector.failed(("a/1", 0), (), "x", 0.0)
    detector.remove(("a/1", 0))
    detector.remove(("a/1", 0))
    assert not detector.watches(("a/1", 0))
    assert detector.shortest(process(2)) == 9.0
    assert detector.settle(5.0, {}) == []
    detector.remove(("b/1", 0))
    detector.disconnected(process(2))
    detector.disconnected(process(2))
    detector.closed(process(2), ConnectionEnd.LOST)
    assert detector.settle(99.0, {}) == []


def test_a_world_with_a_longer_timeout_that_goes_changes_nothing():
    detector = watching(rosters("a", (1, 2), hang=1.0), rosters("b", (1, 2), hang=9.0))
    detector.remove(("b/1", 0))
    assert detector.shortest(process(2)) == 1.0
    lonely = Detector(process(1))
    lonely.add(rosters("a", (1, 2))[0])
    lonely.remove(("a/1", 0))
    assert lonely._peers == {}


def test_a_process_with_two_ranks_is_named_with_both():
    detector = watching(rosters("a", (1, 2, 2)))
    detector.closed(process(2), ConnectionEnd.LOST)
    assert the(detector.settle(1.0, {})).breakage.ranks == (1, 2)


def test_the_own_process_is_never_suspected():
    detector = watching(rosters("a", (1, 1, 2), hang=1.0))
    assert the(detector.settle(1.0, {})).breakage.ranks == (2,)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("heard"), st.integers(2, 5)),
        st.tuples(st.just("closed"), st.integers(2, 5)),
        st.tuples(st.just("again"), st.integers(2, 5)),
        st.tuples(st.just("left"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("told"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("failed"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 2)),
        st.tuples(st.just("time"), st.floats(0.01, 2.0)),
        st.tuples(st.just("stall"), st.floats(0.01, 9.0)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_any_order_of_signs(steps):  # noqa: PLR0915  (one case per sign)
    groups = [
        rosters("a", (1, 2, 3), hang=1.0), rosters("b", (4, 1, 2, 5), hang=3.0), rosters("c", (1, 3, 5), hang=0.3),
    ]  # fmt: skip
    mine = [next(each for each in group if each.members[each.rank].process == process(1)) for group in groups]
    detector = watching(*groups)
    now, last = 0.0, dict.fromkeys(range(2, 6), 0.0)
    over: set = set()
    blamed_in: dict = {}
    suspected: set[int] = set()
    for step in steps:
        kind, value = step[0], step[1]
        hit: set[int] = set()
        told: set = set()
        if kind == "heard":
            detector.heard(process(value), now)
            last[value] = now
        elif kind == "closed":
            detector.closed(process(value), ConnectionEnd.LOST)
            hit = {value}
        elif kind == "again":
            detector.connected(process(value), now)
            last[value] = now
        elif kind == "remove":
            detector.remove(world_id(mine[value]))
            over.add(world_id(mine[value]))
        elif kind in {"time", "stall"}:
            now += value
            if kind == "stall":
                detector.stalled(value, now)
        else:
            roster = mine[value]
            rank = step[2] % roster.size
            told = {world_id(roster)}
            if kind == "left":
                detector.left(world_id(roster), rank)
            elif kind == "told":
                detector.told(world_id(roster), Cause.HUNG, (rank,), "told")
            else:
                detector.failed(world_id(roster), (rank,), "failed", now)
        suspected = {int(each, 16) for each in detector.suspects(now)}
        assert suspected == {
            int(each, 16)
            for each, peer in detector._peers.items()
            if peer.heard is not None and now >= detector._due(peer)
        }
        for verdict in detector.settle(now, {}):
            assert verdict.world not in over, "a second verdict, or one of a world that was removed"
            over.add(verdict.world)
            roster = next(each for each in mine if world_id(each) == verdict.world)
            breakage = verdict.breakage
            blamed = {int(roster.members[rank].process, 16) for rank in breakage.ranks}
            assert breakage.ranks == tuple(sorted(set(breakage.ranks)))
            blamed_in[verdict.world] = set() if breakage.cause is Cause.FAILED else set(breakage.ranks)
            assert roster.rank not in verdict.tell
            if breakage.cause is Cause.CRASHED:
                assert blamed == hit
            elif breakage.cause is Cause.HUNG and breakage.detail != "told":
                assert blamed <= suspected
                assert all(now - last[each] >= roster.hang_timeout for each in blamed)
            elif breakage.cause is not Cause.FAILED:
                assert verdict.world in told
        for loss in detector.losses():
            roster = next(each for each in mine if world_id(each) == loss.world)
            assert loss.ranks
            assert not blamed_in[loss.world] & set(loss.ranks), "lost already"
            blamed_in[loss.world] |= set(loss.ranks)
            who = {int(roster.members[rank].process, 16) for rank in loss.ranks}
            assert who <= hit or all(now - last[each] >= roster.hang_timeout for each in who)
        assert detector.wake() > now or not math.isfinite(detector.wake())
        assert detector.silence_due.time <= detector._silence_due()
    for roster in mine:
        assert detector.watches(world_id(roster)) == (world_id(roster) not in over)
