"""Ledgers of worlds whose ranks are assigned, step by step."""

from __future__ import annotations

import dataclasses
import json

import pytest
from kits.lifekit import seat
from kits.meetkit import ask

from multiworld._core.membership import admission, assigned
from multiworld._core.membership.admission import Phase
from multiworld._core.membership.ledger import Attempt, Claim, Ledger, decode, encode
from multiworld._core.membership.request import state_text, validate
from multiworld._core.membership.roster import LaneAddress
from multiworld.errors import InvalidJoinError, JoinError

TOKEN = "ab" * 16


def me(request):
    return f"id-{request.seat}"


def claim(ledger, *requests, join="", **options):
    """Each request claims, in a join of that name, and sees all others alive."""
    for request in requests:
        waiting = ledger.waiting
        seen = frozenset(each.id for each in waiting.claims) if waiting else frozenset()
        move = admission.claim(ledger, request, me(request) + join, TOKEN, **({"seen": seen} | options))
        assert move.refusal is None, move.refusal
        ledger = move.ledger
        assert decode(encode(ledger), "w") == ledger
    return ledger


def active(ledger, *requests):
    ledger = claim(ledger, *requests)
    for request in requests:
        ledger = admission.ready(ledger, ledger.current.number, me(request))
    assert ledger.current.active
    return ledger


def again(ledger, request, *lost, **changes):
    """The request with which a member of the ledger's generation comes to the next one."""
    now = ledger.current
    mine = next(each for each in now.claims if each.member.process == request.process)
    given = {"past_generation": now.generation} | changes
    return dataclasses.replace(
        request,
        last_generation=now.generation, past=tuple(each.member for each in now.claims),
        past_rank=mine.rank, lost=lost, **given,
    )  # fmt: skip


def seats(ledger):
    return [each.slot for each in ledger.current.claims]


A, B, C = (seat(who, 2, 3) for who in range(3))
D, E = (seat(who, 2, 3) for who in (7, 8))


def test_the_largest_size_seals_and_ranks_follow_the_claims():
    ledger = claim(Ledger(), B, A)
    assert ledger.current is None, "two are enough, and a third may come"
    ledger = claim(ledger, C)
    assert [each.rank for each in ledger.current.claims] == [0, 1, 2]
    assert seats(ledger) == ["s1", "s0", "s2"]
    roster = admission.roster(ledger.current, A, me(A))
    assert (roster.rank, roster.size, roster.members[1].seat) == (1, 3, "s0")


def test_the_last_call_seals_what_is_enough():
    ledger = claim(Ledger(), A)
    assert admission.seal(ledger, 1, me(A), TOKEN, last_call=True) is ledger, "one is not enough"
    ledger = claim(ledger, B)
    assert admission.seal(ledger, 1, me(A), TOKEN) is ledger
    assert seats(admission.seal(ledger, 1, me(A), TOKEN, last_call=True)) == ["s0", "s1"]


def test_survivors_wait_for_each_other_and_not_for_the_lost():
    ledger = active(Ledger(), A, B, C)
    ledger = claim(ledger, again(ledger, C, 0))
    assert ledger.current.lost == (0,)
    assert not assigned.complete(ledger)
    assert [each.slot for each in assigned.expected(ledger)] == ["s1"]
    after = claim(ledger, again(ledger, B, 0))
    assert after.current.generation == 2
    assert seats(after) == ["s1", "s2"], "in their old order"
    assert after.before.generation == 1, "until the next one is active"


def test_members_whose_states_came_in_part_wait_for_one_that_has_a_state():
    ledger = active(Ledger(), A, B, C)
    torn = [again(ledger, each, 0, step=None, torn=True) for each in (B, C)]
    ledger = claim(ledger, *torn)
    assert assigned.complete(ledger)
    assert admission.seal(ledger, ledger.waiting.number, me(B), TOKEN, last_call=True) is ledger
    ledger = claim(ledger, D)
    assert seats(ledger) == ["s1", "s2", "s7"]
    roster = admission.roster(ledger.current, D, me(D))
    assert (roster.steps, roster.torn) == ((None, None, None), (0, 1))


def test_a_member_that_comes_back_has_an_old_state_until_it_has_the_others():
    def steps():
        return admission.roster(ledger.current, C, me(C)).steps

    ledger = active(Ledger(), A, B, C)
    late = again(ledger, C, step=3)
    ledger = active(ledger, *(again(ledger, each, 2, step=4) for each in (A, B)))
    ledger = active(ledger, late, *(again(ledger, each, step=9) for each in (A, B)))
    assert steps() == (9, 9, -4)
    ledger = claim(ledger, D, again(ledger, C, 0, 1, step=-4))
    assert (seats(ledger), steps()) == (["s2", "s7"], (-4, None))


def test_a_new_member_has_its_own_state():
    ledger = active(Ledger(), A, B, C)
    ledger = claim(ledger, *(again(ledger, each, 0, step=None) for each in (B, C)))
    assert admission.roster(ledger.current, B, me(B)).torn == ()


@pytest.mark.parametrize("dead", [True, False])
def test_a_survivor_whose_process_is_gone_is_not_waited_for(dead):
    ledger = active(Ledger(), A, B, C)
    gone = frozenset({me(B)}) if dead else frozenset()
    ledger = claim(ledger, again(ledger, A), again(ledger, C), dead=gone)
    assert (ledger.current.generation == 2) is dead


def test_a_member_that_left_is_not_waited_for():
    ledger = active(Ledger(), A, B, C)
    ledger = admission.over(ledger, 1, me(B), left=True)
    assert (ledger.current.over, ledger.current.lost) == ((1,), (1,))
    assert admission.over(ledger, 1, me(B), left=True) is ledger
    ledger = claim(ledger, again(ledger, C), again(ledger, A))
    assert seats(ledger) == ["s0", "s2"]


def test_a_generation_that_is_over_for_all_is_kept_until_all_have_left():
    ledger = active(Ledger(), A, B, C)
    known = ledger
    for each in (A, B, C):
        ledger = admission.over(ledger, 1, me(each))
    assert ledger.current.over == (0, 1, 2)
    for each in (A, B, C):
        ledger = admission.over(ledger, 1, me(each), left=True)
    assert ledger.current is None
    assert ledger.last == 1
    # One of them comes back all the same: the others may, too.
    ledger = claim(ledger, again(known, B))
    assert (ledger.current.generation, ledger.current.over) == (1, (1,))
    assert [each.slot for each in assigned.expected(ledger)] == ["s0", "s2"]


def test_a_reform_that_fails_is_followed_by_one_of_those_that_are_left():
    ledger = active(Ledger(), A, B, C)
    ledger = claim(ledger, again(ledger, A, 2), again(ledger, B, 2))
    sealed = ledger.current
    failed = admission.fail(ledger, sealed.number, me(A), admission.refusals.abandoned(0, "B died"))
    assert failed.current.generation == 1, "whose members are waited for"
    assert failed.before is None
    assert failed.failure_of(sealed.number).value == "B died"
    after = claim(failed, again(failed, A, 1, 2))
    assert after.current is failed.current or after.current.generation == 1
    one = seat(0, 1, 3)
    assert admission.claim_state(failed, sealed.number, me(A), one).phase is Phase.CLOSED


def test_a_member_that_cannot_take_part_is_not_waited_for():
    ledger = active(Ledger(), A, B, C)
    ledger = claim(ledger, *(again(ledger, each) for each in (A, B, C)))
    failure = admission.refusals.failure_from(JoinError("w", "no memory"), B)
    assert failure.kind == "JoinAbandonedError"
    ledger = admission.fail(ledger, ledger.current.number, me(B), failure, left=True)
    assert (ledger.current.generation, ledger.current.lost) == (1, (1,))
    first = admission.fail(claim(Ledger(), A, B, C), 1, me(B), failure, left=True)
    assert first.current is None


def test_a_number_is_used_once_though_its_attempt_failed():
    ledger = active(Ledger(), A, B, C)
    ledger = claim(ledger, again(ledger, A, 2), again(ledger, B, 2))
    assert ledger.last == 2
    ledger = admission.fail(ledger, ledger.current.number, me(A), admission.refusals.abandoned(0, "no"))
    ledger = claim(ledger, again(ledger, A, 2), again(ledger, B, 2))
    assert ledger.current.generation == 3
    ledger = admission.ready(
        admission.ready(ledger, ledger.current.number, me(A)), ledger.current.number, me(B)
    )
    assert ledger.before is None


def test_newcomers_come_last_and_those_without_room_stay_waiting():
    ledger = active(Ledger(), A, B, C)
    late = [seat(who, 2, 3) for who in (7, 8)]
    ledger = claim(ledger, *late)
    assert ledger.current.generation == 1, "they wait for its end"
    number = ledger.waiting.number
    ledger = claim(ledger, again(ledger, C, 0), again(ledger, B, 0))
    assert seats(ledger) == ["s1", "s2", "s7"]
    assert ledger.current.number == number
    assert [(each.slot, each.rank) for each in ledger.waiting.claims] == [("s8", 0)]
    assert ledger.number == ledger.waiting.number == number + 1
    state = admission.claim_state(ledger, number, me(late[1]), late[1])
    assert state.phase is Phase.OPEN
    assert state.attempt.number == number + 1, "it was moved on"


def moved_on():
    """B and C go on without A; D comes in, E is moved on to the next attempt and does not know it yet."""
    ledger = claim(active(Ledger(), A, B, C), D, E)
    number = ledger.waiting.number
    return number, claim(ledger, again(ledger, C, 0), again(ledger, B, 0))


def test_who_was_moved_on_is_a_member_though_it_has_not_looked():
    number, ledger = moved_on()
    for each in (B, C, D):
        ledger = admission.ready(ledger, number, me(each))
    ledger = claim(ledger, *(again(ledger, each, 2) for each in (B, C)))
    assert seats(ledger) == ["s1", "s2", "s8"]
    state = admission.claim_state(ledger, number, me(E), E)
    assert (state.phase, state.attempt) == (Phase.SEALED, ledger.current)
    # It may give up in that moment: the others hear of it.
    failed = admission.fail(ledger, number, me(E), admission.refusals.abandoned(number, "no"))
    assert failed.failure_of(number + 1).value == "no"
    for each in (B, C, E):
        ledger = admission.ready(ledger, number + 1, me(each))
    assert admission.claim_state(ledger, number, me(E), E).phase is Phase.ACTIVE
    assert admission.over(ledger, number, me(E)).current.over == (2,)
    assert admission.over(ledger, number + 2, me(E)) is ledger


def test_who_was_moved_on_withdraws_from_where_it_is():
    number, ledger = moved_on()
    failure = admission.refusals.abandoned(number, "no")
    assert admission.fail(ledger, number, me(E), failure).waiting is None
    assert admission.expire(ledger, number, me(E), E, timeout=1.0).ledger.waiting is None
    assert admission.fail(ledger, number + 2, me(E), failure) is ledger


def test_what_was_asked_of_one_attempt_is_not_done_to_another():
    """The ledger may have changed since: who asks looks again."""
    ledger = claim(Ledger(), A, B)
    gone = frozenset({me(B)})
    for other in (0, 2):
        assert admission.drop(ledger, other, me(A), gone) is ledger
        assert admission.withdraw(ledger, other, me(A)) is ledger
        assert admission.seal(ledger, other, me(A), TOKEN, last_call=True) is ledger
    assert admission.drop(ledger, 1, me(A), gone) is not ledger
    assert admission.withdraw(ledger, 1, me(A)) is not ledger
    assert admission.seal(ledger, 1, me(A), TOKEN, last_call=True) is not ledger


def test_only_an_active_generation_is_the_one_before():
    """One that never became active is closed with a reason, and its predecessor's members are still waited for."""
    one = active(Ledger(), A, B, C)
    two = claim(one, *(again(one, each) for each in (A, B, C)))
    before = dataclasses.replace(one.current, over=(0, 1, 2))  # as their claims have said
    assert (two.before, two.failures) == (before, ())
    three = claim(two, *(again(one, each) for each in (A, B, C)), join="anew")
    assert three.current.generation == 3
    assert three.before == before
    assert "anew before it was active" in three.failure_of(two.current.number).value


def test_newcomers_alone_wait_for_their_last_call():
    ledger = active(Ledger(), A, B, C)
    late = [seat(who, 2, 3) for who in (7, 8)]
    ledger = claim(ledger, *late)
    number = ledger.waiting.number
    everyone = frozenset(me(each) for each in (A, B, C))
    assert admission.seal(ledger, number, me(late[0]), TOKEN, gone=1, dead=everyone) is ledger
    ledger = admission.seal(ledger, number, me(late[0]), TOKEN, gone=1, dead=everyone, last_call=True)
    assert (ledger.current.generation, seats(ledger)) == (2, ["s7", "s8"])


def test_a_store_that_is_new_learns_from_the_first_survivor():
    known = active(Ledger(), A, B, C)
    ledger = claim(Ledger(), again(known, B, 0))
    assert (ledger.last, ledger.current.generation, ledger.current.lost) == (1, 1, (0,))
    assert ledger.current.active
    ledger = claim(ledger, again(known, C, 0))
    assert (ledger.current.generation, seats(ledger)) == (2, ["s1", "s2"])


def test_an_older_memory_teaches_nothing():
    known = active(Ledger(), A, B, C)
    newer = active(known, again(known, A), again(known, B), again(known, C))
    old = again(known, C, 0, 1)
    assert assigned.remembered(newer, old) is newer
    assert assigned.remembered(newer, dataclasses.replace(old, past=())) is newer
    sealed = claim(newer, again(newer, A), again(newer, B), again(newer, C))
    more = assigned.remembered(sealed, again(newer, A, 1))
    assert (more.before.lost, more.current) == ((1,), sealed.current)


def test_an_open_attempt_goes_on_without_who_gives_up():
    ledger = claim(Ledger(), A, B)
    failure = admission.refusals.abandoned(1, "A gave up")
    left = admission.fail(ledger, 1, me(A), failure)
    assert [(each.slot, each.rank) for each in left.waiting.claims] == [("s1", 0)]
    assert left.failures == ()
    assert admission.refuse(left, failure) is left
    assert admission.withdraw(left, 1, me(B)).waiting is None
    late = admission.expire(ledger, 1, me(A), A, timeout=3.0)
    assert "2 of at least 2 members" in late.refusal.value
    assert len(late.ledger.waiting.claims) == 1
    short = admission.expire(claim(Ledger(), A), 1, me(A), A, timeout=3.0)
    assert "1 of at least 2 members" in short.refusal.value
    assert "missing: 1" in short.refusal.value


def test_a_newcomer_that_waited_in_vain():
    ledger = active(Ledger(), A, B, C)
    new = seat(7, 2, 3)
    ledger = claim(ledger, new)
    move = admission.expire(ledger, ledger.waiting.number, me(new), new, timeout=3.0)
    assert move.refusal.kind == "JoinTimeoutError"
    assert "waited 3.0 s to be let in" in move.refusal.value
    same = dataclasses.replace(new, seat="s1", process=D.process)
    ledger = claim(active(Ledger(), A, B, C), same)
    move = admission.expire(ledger, ledger.waiting.number, me(same), same, timeout=3.0)
    assert move.refusal.kind == "RankTakenError"
    assert "holds seat 's1'" in move.refusal.value


def test_a_seat_that_is_claimed_twice():
    ledger = claim(Ledger(), A)
    twin = dataclasses.replace(D, seat="s0")
    asked = admission.claim(ledger, twin, "other", TOKEN)
    assert asked.holder.id == me(A)
    lost = admission.claim(ledger, twin, "other", TOKEN, living=me(A))
    assert lost.refusal.kind == "RankTakenError"
    assert "Seat 's0'" in lost.refusal.value
    assert lost.ledger.waiting == ledger.waiting, "the others hear nothing of it"
    taken = admission.claim(ledger, twin, "other", TOKEN, dead=frozenset({me(A)}))
    assert [each.id for each in taken.ledger.waiting.claims] == ["other"]


@pytest.mark.parametrize("other", ["a", "z"])
def test_an_older_claim_of_the_same_process_is_dropped(other):
    """Whichever of the two seats comes first."""
    ledger = claim(Ledger(), A, dataclasses.replace(A, seat=other))
    assert [each.slot for each in ledger.waiting.claims] == [other]


def test_a_claim_takes_the_place_of_its_seat_and_leaves_the_others():
    waiting = claim(Ledger(), A, B).waiting
    waiting = dataclasses.replace(waiting, claims=(*waiting.claims, Claim("c", C.member, 0)))
    mine = Claim("mine", dataclasses.replace(D.member, seat="s1"), 0)
    claims = assigned.with_claim(waiting, mine)
    assert [(each.id, each.rank) for each in claims] == [(me(A), 0), ("mine", 1), ("c", 2)]


def test_who_survives():
    one = active(Ledger(), A, B, C)
    two = claim(one, *(again(one, each) for each in (A, B, C)))
    for each in (A, B, C):
        two = admission.ready(two, two.current.number, me(each))
    assert (two.current.generation, two.current.active, two.before) == (2, True, None)
    mine = Claim("new", B.member, 2)
    assert assigned.survives(two, dataclasses.replace(mine, was=2)) == two.current.claims[1]
    assert assigned.survives(two, dataclasses.replace(mine, was=1)) is None, "one of an older generation"
    assert assigned.survives(two, mine) is None, "it does not know that it was there"
    assert assigned.survives(two, Claim("new", D.member, 2, was=2)) is None, "another process"
    assert assigned.survives(Ledger(), dataclasses.replace(mine, was=2)) is None, "there was no generation"


def test_when_an_attempt_is_complete():
    assert not assigned.complete(Ledger())
    assert not assigned.complete(Ledger(), last_call=True)
    assert not assigned.complete(claim(Ledger(), A), last_call=True), "one is not enough"
    ledger = claim(Ledger(), A, B)
    assert not assigned.complete(ledger), "newcomers alone wait for their last call"
    assert assigned.complete(ledger, last_call=True)
    again_there = claim(active(Ledger(), A, B, C), again(active(Ledger(), A, B, C), A, 1))
    assert not assigned.complete(again_there, last_call=True), "one is not enough here, either"


def test_what_is_known_of_losses_only_grows():
    one = active(Ledger(), A, B, C)
    both = assigned.remembered(one, again(one, A, 2, 1))
    assert both.current.lost == (1, 2)
    assert assigned.remembered(both, again(one, A, 1)) is both
    assert assigned.remembered(both, again(one, A, 1, 2)) is both
    assert assigned.remembered(both, again(one, A, 0)).current.lost == (0, 1, 2)
    # A store that was started anew may have another generation of that number, with fewer members.
    assert assigned.remembered(one, again(one, A, 1, 3, 4)).current.lost == (1,)
    # Also of the generation before, while the next one is not active.
    two = claim(one, *(again(one, each) for each in (A, B, C)))
    assert assigned.remembered(two, again(one, A, 1)).before.lost == (1,)
    assert assigned.remembered(two, again(one, A)) is two
    # Ranks of another generation say nothing.
    failed = admission.fail(two, two.current.number, me(A), admission.refusals.abandoned(0, "no"))
    assert (failed.last, failed.current.generation) == (2, 1)
    assert assigned.remembered(failed, again(one, A, 1, past_generation=2)) is failed


def test_newcomers_that_disagree_are_refused_alone_and_yield_to_survivors():
    ledger = active(Ledger(), A, B, C)
    odd, odder = seat(7, 1, 9), seat(8, 1, 8)
    ledger = claim(ledger, odd)
    refused = admission.claim(ledger, odder, "x", TOKEN)
    assert refused.refusal.kind == "MismatchError"
    assert "world_size='1:8'" in refused.refusal.value
    assert refused.ledger.waiting.claims == ledger.waiting.claims
    first = again(ledger, A, 2)
    after = claim(ledger, first)
    assert [each.slot for each in after.waiting.claims] == ["s0"]
    assert admission.claim_state(after, ledger.waiting.number, me(odd), odd).failure.kind == "MismatchError"
    fixed = ask(0, 3, 9)
    assert admission.claim(after, fixed, "y", TOKEN).refusal.kind == "MismatchError"


@pytest.mark.parametrize("names", [["model"], ["net", "optimizer"], ["model", "optimizer", "more"], None, []])
def test_states_of_other_names_are_refused(names):
    def with_state(request, names):
        return dataclasses.replace(request, state=state_text(names))

    waiting = claim(Ledger(), with_state(seat(1, 2, 3), ["model", "optimizer"]))
    refused = admission.claim(waiting, with_state(seat(2, 2, 3), names), "x", TOKEN).refusal
    assert refused.kind == "MismatchError"
    assert "{'model', 'optimizer'}" in refused.value
    assert state_text(names) in refused.value
    without = admission.claim(waiting, seat(2, 2, 3), "x", TOKEN).refusal
    assert "state='none'" in without.value
    claim(waiting, with_state(seat(2, 2, 3), ["optimizer", "model"]))


def test_a_state_of_many_names_is_a_short_text():
    names = [f"layer {at}" for at in range(1000)]
    assert len(state_text(names)) < 300
    assert state_text(names) == state_text(names[::-1]) != state_text(names[:-1])


@pytest.mark.parametrize("state", [1, -1, True, False, "", None, []])
def test_a_record_with_a_state_that_is_none(state):
    text = encode(claim(Ledger(), dataclasses.replace(seat(1, 2, 3), state=state_text(["model"]))))
    record = json.loads(text)
    assert record["waiting"]["terms"][4] == "{'model'}"
    record["waiting"]["terms"][4] = state
    with pytest.raises(JoinError, match="cannot be read"):
        decode(json.dumps(record), "w")


def test_newcomers_that_agree_with_the_world_push_out_those_that_do_not():
    ledger = claim(active(Ledger(), A, B, C), seat(7, 1, 9))
    after = claim(ledger, seat(8, 2, 3))
    assert [each.slot for each in after.waiting.claims] == ["s8"]


def test_a_member_that_waits_with_other_terms_is_not_pushed_out():
    ledger = active(Ledger(), A, B, C)
    ledger = claim(ledger, dataclasses.replace(A, size=9))
    refused = admission.claim(ledger, seat(8, 2, 3), "new", TOKEN)
    assert refused.refusal.kind == "MismatchError"
    assert refused.ledger.waiting == ledger.waiting


def test_members_of_a_fixed_world_push_out_newcomers_that_disagree():
    ledger = Ledger()
    for rank in range(2):
        seen = frozenset(str(each) for each in range(2))
        ledger = admission.claim(ledger, ask(rank), str(rank), TOKEN, seen=seen).ledger
    for rank in range(2):
        ledger = admission.ready(ledger, 1, str(rank))
    ledger = claim(ledger, seat(7, 1, 2))
    again = dataclasses.replace(ask(0), last_generation=1, held_rank=0)
    move = admission.claim(ledger, again, "again", TOKEN)
    assert move.refusal is None
    assert [each.id for each in move.ledger.waiting.claims] == ["again"]
    new = admission.claim(ledger, ask(1, 2, 9), "new", TOKEN)
    assert new.refusal.kind == "MismatchError"
    assert new.ledger.waiting is None, "all hear of it"


def test_the_seat_of_a_member_that_lives_stays_its_own():
    ledger = active(Ledger(), A, B, C)
    thief = dataclasses.replace(D, seat="s1")
    ledger = claim(admission.claim(ledger, thief, "thief", TOKEN).ledger, again(ledger, C, 0))
    assert [each.slot for each in assigned.expected(ledger)] == ["s1"], "the one that lives"
    ledger = claim(ledger, again(ledger, B, 0))
    assert seats(ledger) == ["s1", "s2"]
    assert ledger.current.claims[0].member.process == B.process


def test_a_wait_says_for_what():
    ledger = claim(Ledger(), A)
    told = admission.refusals.awaited(ledger.waiting, A, 5.0, 25.0)
    assert (
        told
        == "Seat 's0' of world 'w' waits for 1 more (1 of at least 2 members are there): 5 s so far, 25 s are left"
    )
    told = admission.refusals.awaited(claim(ledger, B).waiting, A, 5.0, 25.0)
    assert "waits for members that may still come (2 of at least 2 members are there)" in told


@pytest.mark.parametrize(
    ("change", "words"),
    [({"least": 4}, "4:3"), ({"seat": ""}, "seat"), ({"seat": "x" * 201}, "seat"), ({"seat": 3}, "seat")],
)
def test_requests_that_no_world_can_have(change, words):
    validate(A)
    with pytest.raises(InvalidJoinError, match=words):
        validate(dataclasses.replace(A, **change))


def test_records_keep_seats_lanes_and_losses():
    laned = dataclasses.replace(B, lane=LaneAddress(2, "here", 77, 1))
    ledger = active(Ledger(), A, laned, C)
    ledger = claim(ledger, again(ledger, A, 2))
    assert decode(encode(ledger), "w") == ledger
    assert ledger.current.claims[1].member.lane.port == 77


def broken_rows():
    good = active(Ledger(), A, B, C)
    text = encode(good)
    yield text.replace('"gloo","cpu",2,0]', '"gloo","cpu",4,0]'), "a world of"
    yield text.replace('"gloo","cpu",2,0]', '"gloo","cpu",0,0]'), "a world of"
    yield text.replace('"gloo","cpu",2,0]', '"gloo","cpu"]'), "seats belong"
    yield text.replace('["s1",0,0,0]', '["",0,0,0]'), "seats belong"
    yield text.replace('[["s1",0,0,0]]'[1:-1], '["s1",0,0,0],7'), "goes on with"
    ranks = dataclasses.replace(good.current, claims=good.current.claims[1:])
    yield encode(dataclasses.replace(good, current=ranks)), "assigned ranks"


@pytest.mark.parametrize(("text", "words"), list(broken_rows()))
def test_records_that_are_none(text, words):
    with pytest.raises(JoinError, match=words):
        decode(text, "w")


def test_what_an_attempt_counts():
    attempt = Attempt(1, A.terms, claim(Ledger(), A).waiting.claims)
    assert (attempt.size, attempt.missing, attempt.unready) == (1, (1,), (0,))
    assert attempt.at("s0").id == attempt.of(me(A)).id
    assert attempt.at("s9") is attempt.of("x") is None
