"""Worlds that shrink and grow, with any interleaving of round trips, in simulated time."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.lifekit import LAST_CALL, Lives, seat

SEEDS = st.integers(0, 2**32)
SOME = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(sim: Lives, least: int, most: int) -> None:
    made = {}
    for life in sim.lives:
        for roster in life.rosters:
            key = (roster.generation, roster.token) if sim.epoch else roster.generation
            assert made.setdefault(key, roster.members) == roster.members, "two rosters for one number"
            assert [member.rank for member in roster.members] == list(range(roster.size))
            assert len({member.seat for member in roster.members}) == roster.size
            assert len({member.process for member in roster.members}) == roster.size
            assert least <= roster.size <= most
            assert roster.members[roster.rank].process == life.request.process
        numbers = [roster.generation for roster in life.rosters]
        assert numbers == sorted(set(numbers)), "a generation's number never goes back"
    if not sim.epoch:
        for before, after in zip(sim.written, sim.written[1:], strict=False):
            assert after.number >= before.number
            assert after.last >= before.last


def settled(sim: Lives, least: int) -> None:
    """Some time after the last fault all members are active, in one generation without any of the lost."""
    living = [life for life in sim.lives if not life.dead and not life.left]
    active = [life for life in living if life.active is not None]
    if len(living) >= least:
        assert active, [life.errors[-2:] for life in living]
    assert len({life.active.token for life in active}) <= 1
    for life in active:
        assert len(life.active.members) == len(active), "all of its members live, and are active"


@SOME
@given(SEEDS, st.integers(1, 5))
def test_a_full_world_begins_at_once(seed, size):
    sim = Lives(seed, end=3.0)
    for who in range(size):
        sim.life(seat(who, 1, size))
    sim.run()
    check(sim, 1, size)
    assert {life.active.size for life in sim.lives} == {size}
    assert {life.active.generation for life in sim.lives} == {1}


@SOME
@given(SEEDS, st.integers(2, 4))
def test_enough_members_begin_after_the_last_call(seed, size):
    sim = Lives(seed, end=LAST_CALL + 3.0)
    for who in range(size):
        sim.life(seat(who, 2, 8))
    sim.run()
    check(sim, 2, 8)
    assert {life.active.size for life in sim.lives} == {size}


@SOME
@given(SEEDS, st.integers(2, 5), st.data())
def test_survivors_go_on_in_their_old_order_at_once(seed, size, data):
    sim = Lives(seed, end=9.0)
    for who in range(size):
        sim.life(seat(who, 1, size))
    victim = sim.lives[data.draw(st.integers(0, size - 1), "victim")]
    if data.draw(st.booleans(), "leaves"):
        victim.leave_at = 2.0
    else:
        victim.die_at = 2.0
    sim.run()
    check(sim, 1, size)
    settled(sim, 1)
    others = [life for life in sim.lives if life is not victim]
    before = [member.seat for member in others[0].actives[0].members if member.seat != victim.request.seat]
    assert all([member.seat for member in life.active.members] == before for life in others)
    assert {life.active.generation for life in others} == {2}


@SOME
@given(SEEDS)
def test_a_failed_operation_loses_nobody(seed):
    sim = Lives(seed, end=9.0)
    for who in range(4):
        sim.life(seat(who, 1, 4))
    sim.lives[1].fail_at = 2.0
    sim.run()
    check(sim, 1, 4)
    assert {life.active.size for life in sim.lives} == {4}
    assert {life.active.generation for life in sim.lives} == {2}


@SOME
@given(SEEDS)
def test_newcomers_come_last_and_no_more_than_there_is_room_for(seed):
    sim = Lives(seed, end=12.0)
    for who in range(6):
        sim.life(seat(who, 2, 4), start=0.0 if who < 3 else 1.0 + LAST_CALL, timeout=20.0)
    sim.lives[1].die_at = 5.0
    sim.run()
    check(sim, 2, 4)
    settled(sim, 2)
    old = {"s0", "s2"}
    seats = [member.seat for member in sim.lives[0].active.members]
    assert set(seats[:2]) == old
    assert len(seats) == 4
    waits = [life for life in sim.lives[3:] if life.active is None]
    assert len(waits) == 1


@SOME
@given(SEEDS)
def test_fewer_than_least_wait_for_others(seed):
    sim = Lives(seed, end=14.0)
    for who in range(3):
        sim.life(seat(who, 3, 4), timeout=20.0)
    sim.lives[0].die_at = 3.0
    sim.life(seat(7, 3, 4), start=8.0, timeout=20.0)
    sim.run()
    check(sim, 3, 4)
    settled(sim, 3)
    assert sim.lives[1].active.generation == 2


@SOME
@given(SEEDS)
def test_newcomers_that_disagree_do_not_disturb(seed):
    sim = Lives(seed, end=9.0)
    for who in range(3):
        sim.life(seat(who, 1, 3), timeout=20.0)
    wrong = sim.life(seat(7, 1, 3, backend="nccl"), start=1.0, timeout=20.0)
    sim.lives[2].die_at = 3.0
    sim.run()
    assert not wrong.rosters
    sim.joiners.remove(wrong)
    check(sim, 1, 3)
    settled(sim, 1)
    assert {life.active.size for life in sim.lives[:2]} == {2}


@SOME
@given(SEEDS)
def test_a_store_that_dies_with_a_member_is_seeded_by_the_others(seed):
    sim = Lives(seed, end=9.0)
    for who in range(4):
        sim.life(seat(who, 1, 4))
    sim.lives[0].die_at = 2.0
    sim.store_dies = [2.0]
    sim.run()
    check(sim, 1, 4)
    settled(sim, 1)
    assert {life.active.generation for life in sim.lives[1:]} == {2}, "the number goes on"
    assert {life.active.size for life in sim.lives[1:]} == {3}, "they waited for each other"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), SEEDS)
def test_whatever_happens_they_agree_and_go_on(data, seed):
    least = data.draw(st.integers(1, 3), "least")
    most = data.draw(st.integers(least, 5), "most")
    sim = Lives(
        seed, end=30.0,
        blind=data.draw(st.sampled_from([0.0, 0.0, 0.01]), "probes without answer"),
        deaf=data.draw(st.sampled_from([0.0, 0.0, 0.02]), "answers that are lost"),
    )  # fmt: skip
    sim.calm = 10.0
    for who in range(data.draw(st.integers(1, 6), "lives")):
        life = sim.life(
            seat(who, least, most), start=data.draw(st.sampled_from([0.0, 0.0, 0.001, 0.5, 4.0]), "start")
        )
        fate = data.draw(st.sampled_from(["lives"] * 4 + ["dies", "stops", "leaves", "fails"]), "fate")
        when = data.draw(st.floats(0.1, 9.0), "when")
        if fate == "dies":
            life.die_at, life.serves = when, data.draw(st.booleans(), "serves the store")
        elif fate == "stops":
            life.die_after = data.draw(st.integers(0, 40), "calls")
        elif fate == "leaves":
            life.leave_at = when
        elif fate == "fails":
            life.fail_at = when
    sim.run()
    check(sim, least, most)
    settled(sim, least)
