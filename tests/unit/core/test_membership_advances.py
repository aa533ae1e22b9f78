"""Ledgers of worlds that change their members while they work, step by step."""

from __future__ import annotations

import dataclasses

import pytest
from kits.lifekit import seat

from multiworld._core.membership import admission, assigned, refusals
from multiworld._core.membership.admission import Phase
from multiworld._core.membership.ledger import Ledger, decode, encode
from multiworld._core.membership.state_sources import latest, sources
from multiworld.errors import JoinError

TOKEN = "ab" * 16
A, B, C, D = (seat(who, 1, 3) for who in range(4))


def me(request):
    return f"id-{request.seat}{'+' * request.working}"


def claims(ledger, request, **options):
    waiting = ledger.waiting
    seen = frozenset(each.id for each in waiting.claims) if waiting else frozenset()
    move = admission.claim(ledger, request, me(request), TOKEN, **({"seen": seen} | options))
    assert decode(encode(move.ledger), "w") == move.ledger
    return move


def claim(ledger, *requests, **options):
    for request in requests:
        move = claims(ledger, request, **options)
        assert move.refusal is None, move.refusal
        ledger = move.ledger
    return ledger


def ready(ledger, *requests):
    for request in requests:
        ledger = admission.ready(ledger, ledger.current.number, me(request))
        assert decode(encode(ledger), "w") == ledger
    return ledger


def two():
    """A world of A and B, which is active."""
    ledger = claim(Ledger(), A, B)
    ledger = admission.seal(ledger, ledger.waiting.number, me(A), TOKEN, last_call=True)
    ledger = ready(ledger, A, B)
    assert ledger.current.active
    return ledger


def beside(ledger, request, **changes):
    """The request with which a member of the active generation prepares the next one."""
    now = ledger.current
    rank = next(each.rank for each in now.claims if each.member.process == request.process)
    given = {"past": tuple(each.member for each in now.claims), "past_generation": now.generation}
    return dataclasses.replace(
        request, last_generation=now.generation, past_rank=rank, working=True, **(given | changes)
    )


def seats(ledger):
    return [each.slot for each in ledger.current.claims]


def sealed(leaver=None):
    """The next generation of A, B and the newcomer C, sealed beside the active one."""
    ledger = claim(two(), C)
    if leaver is not None:
        ledger = assigned.leave(ledger, 1, leaver)
    for rank, request in enumerate((A, B)):
        if rank != leaver:
            ledger = claim(ledger, beside(two(), request))
    assert ledger.current.generation == 2
    return ledger


def test_a_newcomer_is_due_and_all_members_prepare():
    ledger = two()
    assert not assigned.due(ledger, 1), "no newcomer waits"
    ledger = claim(ledger, C)
    assert assigned.due(ledger, 1)
    assert not assigned.due(ledger, 2), "that is not the one which works"
    assert not assigned.due(ledger, 1, frozenset({me(C)})), "the newcomer died"
    first, second = beside(ledger, A, step=7), beside(ledger, B, step=9)
    ledger = claim(ledger, first)
    assert ledger.waiting is not None, "B is missing"
    assert not assigned.complete(ledger, last_call=True), "no last call goes on without a member that works"
    ledger = claim(ledger, second)
    now = ledger.current
    assert (seats(ledger), now.generation, now.after, now.limits) == (["s0", "s1", "s2"], 2, 1, (0, 0))
    assert ledger.before.generation == 1
    roster = admission.roster(now, C, me(C))
    assert (roster.rank, roster.steps) == (2, (7, 9, None))


def test_it_is_active_when_all_are_ready_and_have_said_their_limits():
    ledger = sealed()
    number = ledger.current.number
    assert assigned.limit(ledger, 1, 0, 20) is ledger, "not all are ready"
    ledger = ready(ledger, beside(two(), A), beside(two(), B), C)
    assert not ledger.current.active
    assert ledger.current.entry == 0
    assert assigned.limit(ledger, 3, 0, 20) is ledger, "of another generation"
    ledger = assigned.limit(ledger, 1, 0, 20)
    assert assigned.limit(ledger, 1, 0, 30) is ledger, "it was said"
    assert ledger.current.entry == 0
    assert ledger.before is not None
    ledger = assigned.limit(ledger, 1, 1, 25)
    assert (ledger.current.active, ledger.current.entry, ledger.before) == (True, 25, None)
    assert decode(encode(ledger), "w") == ledger
    assert admission.claim_state(ledger, number, me(C), C).phase is Phase.ACTIVE


def entered():
    ledger = ready(sealed(), beside(two(), A), beside(two(), B), C)
    return assigned.limit(assigned.limit(ledger, 1, 0, 5), 1, 1, 6)


def test_newcomers_alone_are_nobody_until_a_member_has_entered():
    ledger = entered()
    assert [each.slot for each in ledger.current.holders] == ["s0", "s1"]
    alone = dataclasses.replace(beside(ledger, C), working=False, lost=(0, 1))
    over = admission.over(ledger, ledger.current.number, me(C))
    broken = claim(over, alone)
    assert not admission.may_seal(broken), "A and B hold it"
    assert assigned.survives(broken, broken.waiting.claims[0]) is None
    began = assigned.enter(broken, 1, 0)
    assert admission.may_seal(began)
    assert assigned.survives(began, began.waiting.claims[0]).rank == 2


def test_a_member_that_has_not_entered_survives_in_its_new_rank():
    ledger = assigned.enter(entered(), 1, 0)
    late = dataclasses.replace(beside(two(), B), working=False)
    ledger = claim(ledger, late)
    assert assigned.survives(ledger, ledger.waiting.of(me(late))).rank == 1


def test_entering_is_counted():
    ledger = entered()
    assert assigned.enter(ledger, 0, 0) is ledger
    assert assigned.enter(ledger, 2, 0) is ledger
    assert not assigned.all_entered(ledger, 1)
    ledger = assigned.enter(ledger, 1, 1)
    assert assigned.enter(ledger, 1, 1) is ledger
    assert not assigned.all_entered(ledger, 1)
    ledger = assigned.enter(ledger, 1, 0)
    assert assigned.all_entered(ledger, 1)
    assert assigned.all_entered(ledger, 7), "it was followed by another"
    assert assigned.all_entered(Ledger(), 1)


def test_a_failure_before_all_have_said_leaves_the_old_generation():
    ledger = sealed()
    failed = admission.fail(ledger, ledger.current.number, me(C), refusals.abandoned(0, "it died"))
    assert (failed.current.generation, failed.current.active, failed.before) == (1, True, None)
    assert failed.last == 2, "the number is used up"


def test_leaving():
    ledger = two()
    assert assigned.leave(ledger, 9, 0) is ledger
    ledger = assigned.leave(ledger, 1, 0)
    assert assigned.leave(ledger, 1, 0) is ledger
    assert assigned.leaves(ledger, 1, 0)
    assert not assigned.leaves(ledger, 1, 1)
    assert not assigned.leaves(ledger, 2, 0)
    assert not assigned.leaves(Ledger(), 1, 0)
    assert assigned.due(ledger, 1)
    ledger = claim(ledger, beside(ledger, B))
    assert (seats(ledger), ledger.current.limits) == (["s1"], (0, 0)), "the leaver says its limit too"
    ledger = ready(ledger, beside(two(), B))
    ledger = assigned.limit(assigned.limit(ledger, 1, 0, 4), 1, 1, 3)
    assert ledger.current.entry == 4


def test_where_all_want_to_leave_they_let_newcomers_in_first():
    ledger = assigned.leave(assigned.leave(two(), 1, 0), 1, 1)
    assert not assigned.due(ledger, 1)
    assert not assigned.leaves(ledger, 1, 0)
    assert assigned.due(claim(ledger, C), 1)


def test_fewer_than_least_do_not_let_a_member_leave():
    one, other = (seat(who, 2, 3) for who in range(2))
    ledger = claim(Ledger(), one, other)
    ledger = admission.seal(ledger, ledger.waiting.number, me(one), TOKEN, last_call=True)
    ledger = assigned.leave(ready(ledger, one, other), 1, 0)
    assert not assigned.due(ledger, 1)
    assert assigned.due(claim(ledger, seat(2, 2, 3)), 1), "a newcomer takes its place"


def test_a_newcomer_in_the_seat_of_a_member_or_with_other_terms_is_not_due():
    ledger = claim(two(), dataclasses.replace(C, seat="s1"))
    assert not assigned.due(ledger, 1)
    ledger = claim(two(), dataclasses.replace(C, backend="nccl"))
    assert not assigned.due(ledger, 1)


def test_nothing_is_due_in_a_generation_that_is_over():
    ledger = claim(two(), C)
    assert not assigned.due(admission.over(ledger, ledger.current.number, me(A)), 1)


def test_who_says_first_that_it_broke_ends_the_preparation():
    start = claim(two(), C)
    working = claim(start, beside(start, A))
    reform = dataclasses.replace(beside(start, B), working=False)
    ledger = claim(working, reform)
    assert {each.id for each in ledger.waiting.claims} == {me(C), me(reform)}, "A's claim is dropped"
    refused = claims(ledger, beside(start, A))
    assert refused.refusal.kind == "JoinAbandonedError"
    assert "is over" in refused.refusal.value
    alone = claim(claim(two(), beside(two(), A)), reform)
    assert {each.id for each in alone.waiting.claims} == {me(reform)}
    mixed = dataclasses.replace(alone, waiting=dataclasses.replace(alone.waiting, claims=()))
    assert assigned.settled(mixed, reform) is mixed
    stranger = dataclasses.replace(beside(start, A), process="f" * 32)
    assert claims(start, stranger).refusal is not None


def test_only_claims_that_work_are_dropped_also_the_last():
    ledger = claim(two(), beside(two(), A))
    left = assigned.settled(ledger, dataclasses.replace(beside(two(), B), working=False))
    assert left.waiting is None


def test_a_store_that_was_started_anew_hears_that_the_generation_works():
    request = beside(two(), A)
    ledger = assigned.remembered(Ledger(), request)
    assert (ledger.last, ledger.current.over, ledger.current.active) == (1, (), True)
    assert assigned.due(claim(ledger, C), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"after": 0}, "2 limits after generation 0"), ({"limits": ()}, "0 limits after generation 1")],
)
def test_records_that_are_none(change, words):
    ledger = sealed()
    wrong = dataclasses.replace(ledger, current=dataclasses.replace(ledger.current, **change))
    with pytest.raises(JoinError, match=words):
        decode(encode(wrong), "w")


@pytest.mark.parametrize(
    ("steps", "torn", "wanted"),
    [
        ((None, None, None), (0,), {0: 1, 2: 1}),
        ((None, None, None), (0, 1), {0: 2, 1: 2}),
        ((None, 0), (0,), {0: 1}),
        ((5, None, 4), (1,), {1: 0, 2: 0}),
    ],
)
def test_a_state_that_came_in_part_is_sent_to_no_member(steps, torn, wanted):
    assert sources(steps, torn) == wanted


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ((), {}),
        ((3,), {}),
        ((None,), {}),
        ((None, None, None), {1: 0, 2: 0}),
        ((5, 5, None), {2: 0}),
        ((5, 4, 5, None, None), {1: 0, 3: 2, 4: 0}),
        ((0, None), {1: 0}),
        ((None, 0), {0: 1}),
        ((-3, None, 1), {0: 2, 1: 2}),  # an old state of two advances
        ((None, -3), {0: 1}),
        ((-3, -6, -6), {0: 1}),
    ],
)
def test_who_gets_the_state_from_whom(steps, wanted):
    assert sources(steps) == wanted


@pytest.mark.parametrize(
    ("steps", "of_the_world"),
    [((), 0), ((None,), 0), ((4, None, 3), 4), ((-11, 2), 2), ((-11, None, -3), 10)],
)
def test_an_old_state_counts_where_no_member_has_a_later_one(steps, of_the_world):
    assert latest(steps) == of_the_world
