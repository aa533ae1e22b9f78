"""The rendezvous' driver, with any interleaving of round trips, in simulated time."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.meetkit import Killed, Simulation, ask

from multiworld.errors import (
    JoinAbandonedError,
    JoinTimeoutError,
    MismatchError,
    RankTakenError,
    StaleGenerationError,
)

SEEDS = st.integers(0, 2**32)
SOME = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LOCAL = {RankTakenError, StaleGenerationError}  # may be one process's own business


@SOME
@given(SEEDS, st.integers(1, 5), st.booleans())
def test_all_members_get_one_roster(seed, size, apart):
    sim = Simulation(seed)
    for rank in range(size):
        sim.joiner(ask(rank, size), start=sim.random.uniform(0, 2.0) if apart else 0.0)
    sim.run()
    assert all(each.committed for each in sim.joiners)
    assert len({(each.roster.members, each.roster.token) for each in sim.joiners}) == 1
    assert {each.roster.generation for each in sim.joiners} == {1}
    assert [each.roster.rank for each in sim.joiners] == list(range(size))
    assert [member.rank for member in sim.joiners[0].roster.members] == list(range(size))
    # Where many came at once a letter may be left: its sender deletes it with the generation's keys.
    assert set(sim.keys) - {"m8d/w/letters/1"} == {"m8d/w/record"}


@SOME
@given(SEEDS, st.integers(2, 4))
def test_whoever_disagrees_everyone_raises_the_same(seed, size):
    sim = Simulation(seed)
    odd = sim.random.randrange(size)
    change = sim.random.choice(({"size": size + 1}, {"backend": "nccl"}, {"device_type": "cuda"}))
    for rank in range(size):
        sim.joiner(ask(rank, **({"size": size} | (change if rank == odd else {}))), start=rank * 0.01)
    sim.run()
    # Two that agree may fail as early as the odd one comes; who comes later opens the next attempt and waits in vain.
    kinds = {type(each.error) for each in sim.joiners}
    assert kinds <= {MismatchError, JoinTimeoutError}
    assert MismatchError in kinds
    assert all(not each.committed for each in sim.joiners)


@SOME
@given(SEEDS)
def test_a_rank_claimed_twice_is_told_to_all(seed):
    sim = Simulation(seed)
    for rank, who in ((0, 0), (1, 1), (1, 9)):
        sim.joiner(ask(rank, 3, who), start=sim.random.uniform(0, 0.2), timeout=5.0)
    sim.run()
    assert {type(each.error) for each in sim.joiners} == {RankTakenError}
    for each in sim.joiners:
        assert "pid 1001" in str(each.error)
        assert "pid 1009" in str(each.error)
        assert each.ended < 1.5, "long before the timeout"


@SOME
@given(SEEDS)
def test_a_claim_without_a_sign_of_life_is_taken_over(seed):
    sim = Simulation(seed)
    victim = sim.joiner(ask(1, 2, 1))
    victim.die_after = sim.random.randrange(1, 12)
    again = sim.joiner(ask(1, 2, 7), start=sim.random.uniform(0.5, 1.0), timeout=20.0)
    other = sim.joiner(ask(0, 2, 0), start=5.0, timeout=20.0)
    sim.run()
    assert isinstance(victim.error, Killed)
    assert other.committed, other.error
    assert again.committed, again.error
    assert other.roster.members[1].pid == 1007


@SOME
@given(SEEDS, st.integers(2, 4))
def test_the_first_timeout_ends_it_for_all_and_names_who_is_missing(seed, size):
    sim = Simulation(seed)
    for rank in range(1, size):
        sim.joiner(ask(rank, size), start=sim.random.uniform(0, 0.3), timeout=2.0 + 3 * (rank > 1))
    sim.run()
    assert {type(each.error) for each in sim.joiners} == {JoinTimeoutError}
    for each in sim.joiners:
        assert "missing: rank 0" in str(each.error)
        assert "rank 1 (host host1, pid 1001)" in str(each.error)
        assert each.ended < 2.5


@SOME
@given(SEEDS)
def test_a_cancelled_join_ends_it_for_all(seed):
    sim = Simulation(seed)
    for rank in range(3):
        sim.joiner(ask(rank, 4))
    sim.joiners[sim.random.randrange(3)].cancel_at = sim.random.uniform(0.1, 1.0)
    sim.run()
    assert {type(each.error) for each in sim.joiners} == {JoinAbandonedError}
    assert max(each.ended for each in sim.joiners) < 1.5


@SOME
@given(SEEDS)
def test_a_member_that_cannot_build_ends_it_for_all(seed):
    sim = Simulation(seed)
    for rank in range(3):
        sim.joiner(ask(rank, 3))
    victim = sim.joiners[sim.random.randrange(3)]
    victim.fails_to_build = True
    sim.run()
    assert not any(each.committed for each in sim.joiners)
    assert {type(each.error) for each in sim.joiners if each is not victim} == {JoinAbandonedError}
    assert all("RuntimeError: no group" in str(each.error) for each in sim.joiners if each is not victim)


@SOME
@given(SEEDS)
def test_whoever_asks_for_an_active_rank_waits_and_nobody_feels_it(seed):
    sim = Simulation(seed)
    for rank in range(2):
        sim.joiner(ask(rank))
    third = sim.joiner(ask(1, 2, 9), start=2.0, timeout=3.0)
    sim.run()
    assert [each.committed for each in sim.joiners] == [True, True, False]
    assert isinstance(third.error, RankTakenError)
    assert "pid 1001" in str(third.error)
    assert 4.9 < third.ended < 5.5


@SOME
@given(SEEDS)
def test_a_generation_all_of_whose_members_died_silently_is_followed_by_the_next(seed):
    sim = Simulation(seed)
    for who in range(4):
        rank = who % 2
        sim.joiner(ask(rank, 2, who), start=5.0 * (who > 1))
    first = sim.joiners[:2]
    gone = {each.request.endpoint for each in first}
    sim.probe = lambda ends, within: {end: end not in gone or sim.now < 5 for end in ends}
    sim.run()
    assert [each.roster.generation for each in sim.joiners] == [1, 1, 2, 2]
    assert all(each.committed for each in sim.joiners)
    assert first[0].roster.token != sim.joiners[2].roster.token


@SOME
@given(SEEDS)
def test_two_new_processes_do_not_push_a_living_generation_aside(seed):
    sim = Simulation(seed)
    for who in range(4):
        sim.joiner(ask(who % 2, 2, who), start=2.0 * (who > 1), timeout=3.0)
    sim.run()
    assert [each.committed for each in sim.joiners] == [True, True, False, False]
    assert {type(each.error) for each in sim.joiners[2:]} <= {RankTakenError}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), SEEDS)
def test_whatever_happens_nobody_disagrees(data, seed):
    sim = Simulation(seed)
    size = data.draw(st.integers(1, 3), "size")
    for who in range(data.draw(st.integers(1, 7), "joiners")):
        rank = data.draw(st.integers(0, size - 1), "rank")
        changes = data.draw(
            st.sampled_from([{}, {}, {}, {}, {"backend": "x"}, {"size": size + 1}]), "changes"
        )
        last = data.draw(st.sampled_from([0, 0, 0, 3]), "last")
        held = rank if last and data.draw(st.booleans(), "held") else None
        request = ask(
            rank, **({"size": size, "who": who, "last_generation": last, "held_rank": held} | changes)
        )
        joiner = sim.joiner(
            request,
            start=data.draw(st.sampled_from([0.0, 0.0, 0.001, 0.1, 3.0]), "start"),
            timeout=data.draw(st.sampled_from([0.5, 3.0, 6.0]), "timeout"),
        )
        fate = data.draw(st.sampled_from(["lives"] * 6 + ["dies", "cancels", "breaks"]), "fate")
        if fate == "dies":
            joiner.die_after = data.draw(st.integers(0, 20), "calls")
        elif fate == "cancels":
            joiner.cancel_at = joiner.start + data.draw(st.sampled_from([0.0, 0.002, 0.4]), "cancel")
        joiner.fails_to_build = fate == "breaks"
    sim.run()
    check(sim)


def check(sim: Simulation) -> None:
    rosters = {}
    for each in sim.joiners:
        assert each.ended <= each.start + each.timeout + 0.3, "nobody waits beyond its timeout"
        if each.roster is None:
            continue
        made = (each.roster.members, each.roster.token)
        assert rosters.setdefault(each.roster.generation, made) == made, "two rosters for one generation"
        assert each.roster.generation > each.request.last_generation
        mine = each.roster.members[each.request.rank]
        assert mine == each.request.member, "my place is mine"
        processes = {other.request.process: other.request for other in sim.joiners}
        for member in each.roster.members:
            assert processes[member.process].member == member
            assert processes[member.process].terms == each.request.terms
    assert len({token for _, token in rosters.values()}) == len(rosters)
    # A generation is active for all of its members or for none: but for the dead, and those that died or were
    # cancelled in between.
    for generation in rosters:
        members = [each for each in sim.joiners if each.roster and each.roster.generation == generation]
        if any(each.committed for each in members):
            assert all(each.committed or each.dead or each.cancel_at <= each.ended for each in members), [
                each.error for each in members
            ]
    # All that were in an attempt when it was closed raise the kind that it was closed with.
    closed = {failure.attempt: failure.kind for ledger in sim.written for failure in ledger.failures}
    for each in sim.joiners:
        if each.error is None or each.dead or each.fails_to_build or each.cancel_at <= each.ended:
            continue
        if closed.get(each.attempt) != type(each.error).__name__:
            assert each.attempt not in closed or type(each.error) in LOCAL, (each.error, closed)
            assert type(each.error) in LOCAL | {MismatchError}, each.error
    # The numbers only rise.
    for before, after in zip(sim.written, sim.written[1:], strict=False):
        assert after.number >= before.number
        assert after.last >= before.last
