"""The steps on a world's record, one by one, and the record's text."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.meetkit import ask

from multiworld._core.membership import admission, refusals
from multiworld._core.membership import ledger as ledger_module
from multiworld._core.membership.admission import Phase
from multiworld._core.membership.ledger import (
    FAILURES_KEPT,
    MAX_RECORD,
    MAX_SIZE,
    MAX_TEXT,
    Attempt,
    Claim,
    Failure,
    Ledger,
    Terms,
    decode,
    encode,
)
from multiworld._core.membership.request import validate
from multiworld._core.membership.roster import LaneAddress, Roster
from multiworld.errors import (
    BackendError,
    BrokenWorldException,
    InvalidJoinError,
    JoinAbandonedError,
    JoinError,
    JoinTimeoutError,
)

TOKEN = "ab" * 16


def claimed(ledger, *requests):
    """The ledger after these claims; a claim's id is its process's last four digits."""
    for request in requests:
        there = () if ledger.waiting is None else ledger.waiting.claims
        seen = frozenset(claim.id for claim in there)
        move = admission.claim(ledger, request, ident(request), TOKEN, seen=seen)
        assert move.refusal is None
        assert move.holder is None
        ledger = move.ledger
    return ledger


def ident(request):
    return request.process[-4:]


def active(*requests, before=None):
    ledger = claimed(before or Ledger(), *requests)
    for request in requests:
        ledger = admission.ready(ledger, ledger.current.number, ident(request))
    return ledger


def test_the_last_claim_seals():
    half = claimed(Ledger(), ask(1))
    assert half.waiting.missing == (0,)
    assert admission.claim_state(half, 1, "0001", ask(1)).phase is Phase.OPEN
    full = claimed(half, ask(0))
    assert full.waiting is None
    assert (full.current.generation, full.last, full.current.unready) == (1, 1, (0, 1))
    assert admission.claim_state(full, 1, "0001", ask(1)).phase is Phase.SEALED
    roster = admission.roster(full.current, ask(1), "0001")
    assert (roster.key, roster.rank, roster.size, roster.token) == ("w/1", 1, 2, b"\xab" * 16)


def test_the_last_ready_makes_it_active():
    ledger = claimed(Ledger(), ask(0), ask(1))
    one = admission.ready(ledger, 1, "0000")
    assert not one.current.active
    assert admission.ready(one, 1, "0000") is one
    assert admission.ready(one, 1, "beef") is one, "a stranger"
    assert admission.ready(one, 7, "0001") is one, "another attempt"
    both = admission.ready(one, 1, "0001")
    assert admission.claim_state(both, 1, "0000", ask(0)).phase is Phase.ACTIVE


@pytest.mark.parametrize(("last", "others", "expected"), [(0, 0, 1), (4, 0, 5), (2, 9, 10)])
def test_a_generation_is_larger_than_all_that_anybody_knows(last, others, expected):
    ledger = claimed(Ledger(last=last), ask(0), ask(1, last_generation=others))
    assert ledger.current.generation == ledger.last == expected


def test_nothing_is_sealed_before_all_have_been_seen():
    half = claimed(Ledger(), ask(0))
    full = admission.claim(half, ask(1), "0001", TOKEN).ledger
    assert full.waiting.missing == ()
    assert admission.seal(full, 1, "0000", TOKEN).current.generation == 1
    assert admission.drop(full, 1, "beef", frozenset({"0001"})) is full, (
        "a process that is no member drops none"
    )
    assert admission.drop(full, 1, "0000", frozenset({"0000"})) is full, "a member does not drop itself"
    assert admission.drop(full, 1, "0000", frozenset({"0001"})).waiting.missing == (1,)


def test_the_dead_are_not_asked_what_they_think():
    other = admission.claim(
        claimed(Ledger(), ask(0)), ask(1, 3, who=7), "0007", TOKEN, dead=frozenset({"0000"})
    )
    assert other.refusal is None
    assert other.ledger.waiting.terms.size == 3
    assert other.ledger.waiting.missing == (0, 2)


def test_claiming_again_changes_nothing():
    half = claimed(Ledger(), ask(0))
    assert admission.claim(half, ask(0), "0000", TOKEN).ledger is half


def test_two_claims_need_a_look_at_the_first_one():
    half = claimed(Ledger(), ask(0))
    move = admission.claim(half, ask(0, who=7), "0007", TOKEN)
    assert (move.holder.id, move.ledger) == ("0000", half)
    taken = admission.claim(half, ask(0, who=7), "0007", TOKEN, living="0000")
    assert taken.ledger.waiting is None
    assert taken.refusal.kind == "RankTakenError"
    assert taken.ledger.failure_of(1) == taken.refusal
    over = admission.claim(half, ask(0, who=7), "0007", TOKEN, dead=frozenset({"0000"}))
    assert [claim.id for claim in over.ledger.waiting.claims] == ["0007"]
    state = admission.claim_state(over.ledger, 1, "0000", ask(0))
    assert state.phase is Phase.CLOSED
    assert "taken over by host host7, pid 1007" in state.failure.value


def test_a_member_of_the_generation_before_has_the_right_to_its_rank():
    first = active(ask(0), ask(1))
    new = claimed(first, ask(0, who=7))
    back = admission.claim(new, ask(0, last_generation=1), "0000", TOKEN)
    assert [claim.id for claim in back.ledger.waiting.claims] == ["0000"]
    refused = admission.claim(back.ledger, ask(0, who=8), "0008", TOKEN)
    assert refused.refusal.kind == "RankTakenError"
    assert refused.ledger is back.ledger, "the rightful member feels nothing"


def test_a_rejoin_with_a_replacement():
    first = admission.over(active(ask(0), ask(1)), 1, "0000")
    ledger = claimed(first, ask(1, who=7), ask(0, last_generation=1, held_rank=0))
    assert ledger.current.generation == 2
    assert [claim.member.pid for claim in ledger.current.claims] == [1000, 1007]


def test_a_generation_that_nobody_ended_is_in_the_way_of_strangers():
    ledger = claimed(active(ask(0), ask(1)), ask(0, who=7), ask(1, who=8))
    assert ledger.waiting.missing == ()
    assert not admission.may_seal(ledger)
    assert admission.seal(ledger, 2, "0007", TOKEN) is ledger
    assert admission.seal(ledger, 2, "0007", TOKEN, gone=2) is ledger, "another attempt's members are gone"
    assert admission.seal(ledger, 2, "beef", TOKEN, gone=1) is ledger, "a stranger seals nothing"
    assert admission.seal(ledger, 2, "0007", TOKEN, gone=1).current.generation == 2
    ended = admission.over(ledger, 1, "0001")
    assert admission.seal(ended, 2, "0007", TOKEN).current.generation == 2
    assert not admission.may_seal(Ledger())


def test_an_attempt_that_never_became_active_is_closed_by_the_next():
    first = claimed(Ledger(), ask(0), ask(1))
    first = dataclasses.replace(first, current=_as_of_another_join(first.current))
    second = claimed(first, ask(0), ask(1, who=7))
    assert second.current.number == 2
    assert admission.claim_state(second, 1, "anew0001", ask(1)).failure.kind == "JoinAbandonedError"


def _as_of_another_join(attempt):
    claims = tuple(dataclasses.replace(each, id=f"anew{each.id}") for each in attempt.claims)
    return dataclasses.replace(attempt, claims=claims)


def test_whoever_holds_a_generation_that_is_over_is_fenced():
    first = admission.over(active(ask(0), ask(1)), 1, "0000")
    second = active(ask(0, last_generation=1), ask(1, who=7), before=first)
    stale = ask(1, last_generation=1, held_rank=1)
    move = admission.claim(second, stale, "0001", TOKEN)
    assert move.ledger is second
    assert move.refusal.kind == "StaleGenerationError"
    assert "generation 1" in move.refusal.value
    assert "generation 2" in move.refusal.value
    assert admission.fenced(second, dataclasses.replace(stale, held_rank=0)) is None
    assert admission.fenced(second, dataclasses.replace(stale, last_generation=2)) is None
    assert admission.fenced(second, ask(0, last_generation=1, held_rank=0)) is None, "still a member"
    assert admission.fenced(second, ask(5, 6, last_generation=1, held_rank=5)) is None, "no member is there"
    assert admission.fenced(admission.over(second, 2, "0000"), stale) is None, "that one is over too"
    assert admission.fenced(Ledger(), stale) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"size": 3}, "rank 1 (host host1, pid 1001) says world_size=3, rank 0 (host host0, pid 1000) say world_size=2"),
        ({"backend": "nccl"}, "backend='nccl'"),
        ({"device_type": "cuda"}, "device='cuda'"),
    ],
)  # fmt: skip
def test_disagreement_closes_the_attempt(change, text):
    move = admission.claim(claimed(Ledger(), ask(0)), ask(1, **change), "0001", TOKEN)
    assert move.refusal.kind == "MismatchError"
    assert text in move.refusal.value
    assert admission.claim_state(move.ledger, 1, "0000", ask(0)).failure == move.refusal


def test_an_attempt_fails_only_by_its_own_members_and_only_before_it_is_active():
    why = Failure(0, "BackendError", "no")
    half = claimed(Ledger(), ask(0))
    assert admission.fail(half, 1, "beef", why) is half
    closed = admission.fail(half, 1, "0000", why)
    assert closed.failure_of(1) == dataclasses.replace(why, attempt=1)
    assert admission.fail(closed, 1, "0000", why) is closed
    sealed = claimed(Ledger(), ask(0), ask(1))
    assert admission.fail(sealed, 1, "0001", why).current is None
    done = active(ask(0), ask(1))
    assert admission.fail(done, 1, "0001", why) is done


def test_the_reasons_of_the_last_attempts_are_kept():
    ledger = Ledger()
    for number in range(1, 10):
        ledger = admission.fail(claimed(ledger, ask(0)), number, "0000", Failure(0, "JoinError", "no"))
    assert len(ledger.failures) == FAILURES_KEPT
    assert admission.claim_state(ledger, 9, "0000", ask(0)).failure.kind == "JoinError"
    assert admission.claim_state(ledger, 1, "0000", ask(0)).failure.kind == "JoinAbandonedError"


def test_a_claim_in_an_attempt_of_another_store_is_lost():
    other = claimed(Ledger(), ask(1, who=7))
    failure = admission.claim_state(other, 1, "0000", ask(0)).failure
    assert "taken over by a process that has left since" in failure.value
    sealed = claimed(other, ask(0, who=8))
    assert admission.claim_state(sealed, 1, "0000", ask(0)).phase is Phase.CLOSED


def test_when_a_generation_is_over_for_all_only_its_number_is_kept():
    ledger = active(ask(0), ask(1))
    assert admission.over(ledger, 1, "beef") is ledger
    one = admission.over(ledger, 1, "0000")
    assert one.current.over == (0,)
    assert admission.over(one, 1, "0000") is one
    both = admission.over(one, 1, "0001")
    assert both == Ledger(number=1, last=1)
    assert admission.over(both, 1, "0001") is both


def test_withdrawing():
    two = claimed(Ledger(), ask(0, 3), ask(1, 3))
    one = admission.withdraw(two, 1, "0001")
    assert one.waiting.missing == (1, 2)
    assert admission.withdraw(one, 1, "0001") is one
    assert admission.withdraw(one, 1, "0000").waiting is None


def test_an_impossible_member_closes_the_open_attempt():
    why = Failure(0, "InvalidJoinError", "rank=7")
    assert admission.refuse(claimed(Ledger(), ask(0)), why).failure_of(1).value == "rank=7"
    done = active(ask(0), ask(1))
    assert admission.refuse(done, why) is done


def test_time_is_up_for_members_that_miss_others():
    ledger = claimed(Ledger(), ask(1, 3), ask(2, 3))
    move = admission.expire(ledger, 1, "0002", ask(2, 3), timeout=3.0)
    assert move.refusal.kind == "JoinTimeoutError"
    assert (
        "2 of 3 members of world 'w' came within the 3.0 s of rank 2 (host host2, pid 1002)"
        in move.refusal.value
    )
    assert "missing: rank 0; there: rank 1 (" in move.refusal.value
    assert move.ledger.failure_of(1) == move.refusal
    again = admission.expire(move.ledger, 1, "0001", ask(1, 3), timeout=3.0)
    assert (again.ledger, again.refusal) == (move.ledger, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (15.0, "the 12.6 s that rank 2 (host host2, pid 1002) had left of its timeout of 15 s; "),
        (12.62, "the 12.6 s of rank 2 (host host2, pid 1002); "),
    ],
)
def test_a_timeout_of_which_a_part_was_over_is_named_as_it_was_given(given, said):
    ledger = claimed(Ledger(), ask(1, 3), ask(2, 3))
    move = admission.expire(ledger, 1, "0002", ask(2, 3), timeout=12.6, given=given)
    assert f"came within {said}" in move.refusal.value


def test_time_is_up_for_members_that_are_not_ready():
    ledger = admission.ready(claimed(Ledger(), ask(0), ask(1)), 1, "0000")
    move = admission.expire(ledger, 1, "0000", ask(0), timeout=3.0)
    assert "not ready: rank 1 (rank 1 (host host1, pid 1001))" in move.refusal.value
    done = admission.ready(ledger, 1, "0001")
    assert admission.expire(done, 1, "0000", ask(0), timeout=3.0).refusal is None


def test_time_is_up_for_whoever_waits_for_an_active_rank():
    ledger = claimed(active(ask(0), ask(1)), ask(1, who=7), ask(0, who=8))
    move = admission.expire(ledger, 2, "0007", ask(1, who=7), timeout=3.0)
    assert move.refusal.kind == "RankTakenError"
    assert "host host1, pid 1001 holds rank 1" in move.refusal.value
    assert [claim.id for claim in move.ledger.waiting.claims] == ["0008"], "whoever else waits goes on"
    complete = admission.expire(ledger, 2, "0007", ask(1, who=7), timeout=3.0, gone=1)
    assert complete.refusal.kind == "JoinTimeoutError"
    assert "it was not sealed" in complete.refusal.value
    forming = claimed(claimed(Ledger(), ask(0), ask(1)), ask(2, 3, who=7))
    text = admission.expire(forming, 2, "0007", ask(2, 3, who=7), timeout=3.0).refusal.value
    assert "being formed and there is no rank 2 in it" in text


def test_long_lists_of_people_are_cut():
    ledger = claimed(Ledger(), *(ask(rank, 40) for rank in range(9)))
    text = admission.expire(ledger, 1, "0000", ask(0, 40), timeout=1.0).refusal.value
    assert "missing: ranks 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, ..." in text
    assert text.endswith("and 5 more")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (BackendError("w", "no gloo", rule="r", next_step="s"), "BackendError", "no gloo"),
        (JoinTimeoutError("w", "late"), "JoinTimeoutError", "late"),
        (BrokenWorldException("w", "gone"), "JoinAbandonedError", "gone"),
        (ValueError("odd"), "JoinAbandonedError", "ValueError: odd"),
    ],
)
def test_what_others_are_told_of_an_error(error, kind, text):
    failure = refusals.failure_from(error, ask(1))
    assert failure.kind == kind
    assert failure.value.startswith("Rank 1 of world 'w' (host host1, pid 1001) could not join: ")
    assert text in failure.value
    made = refusals.error_of(failure, "w")
    assert type(made).__name__ == kind
    assert made.world == "w"


def test_an_unknown_kind_is_a_join_error():
    assert type(refusals.error_of(Failure(1, "SystemExit", "x"), "w")) is JoinError
    assert type(refusals.error_of(Failure(1, "JoinAbandonedError", "x"), "w")) is JoinAbandonedError


@pytest.mark.parametrize(
    "change",
    [
        {"world": ""}, {"world": "x" * 201}, {"world": None}, {"size": 0}, {"size": True}, {"size": 2.0},
        {"size": MAX_SIZE + 1}, {"rank": 2}, {"rank": -1}, {"rank": True}, {"rank": "0"}, {"backend": ""},
        {"device_type": None}, {"last_generation": -1}, {"last_generation": None},
    ],
)  # fmt: skip
def test_requests_that_no_world_can_satisfy(change):
    with pytest.raises(InvalidJoinError) as caught:
        validate(dataclasses.replace(ask(0), **change))
    assert caught.value.rule
    assert caught.value.next_step


def test_requests_that_are_valid():
    validate(ask(0, 1))
    validate(ask(1, world="x" * 200))


# The record's text.


def samples():
    half = claimed(Ledger(), ask(0))
    first = active(ask(0), ask(1))
    behind = admission.over(claimed(first, ask(1, who=7)), 1, "0000")
    failed = admission.fail(half, 1, "0000", Failure(0, "JoinError", "ä" * 2 * MAX_TEXT, "r", "s"))
    return [Ledger(), half, first, behind, failed]


@pytest.mark.parametrize("ledger", samples())
def test_what_is_written_is_read(ledger):
    text = encode(ledger)
    assert text.isascii()
    read = decode(text, "w")
    cut = tuple(dataclasses.replace(each, value=each.value[:MAX_TEXT]) for each in ledger.failures)
    assert read == dataclasses.replace(ledger, failures=cut)


def test_nothing_is_an_empty_record():
    assert decode("", "w") == Ledger()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)


@given(st.text() | JUNK.map(json.dumps))
def test_garbage_is_an_error_with_its_text(text):
    if text:
        with pytest.raises(JoinError) as caught:
            decode(text, "w")
        assert caught.value.next_step


@given(st.sampled_from(samples()), st.data())
def test_a_record_with_one_wrong_part_is_an_error_or_another_record(ledger, data):
    fields = json.loads(encode(ledger))
    place = fields
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(JUNK)
        break
    try:
        read = decode(json.dumps(fields), "w")
    except JoinError:
        return
    assert decode(encode(read), "w").number == read.number
    if read.current is not None and read.current.generation:
        assert len(admission.roster(read.current, ask(0), "").token) == 16


def with_claim(row):
    attempt = {"n": 1, "terms": [1, "a", "b"], "g": 0, "token": "", "claims": [row]}
    return json.dumps({"m8d": 1, "n": 1, "g": 1, "current": attempt})


@pytest.mark.parametrize(
    "text",
    [
        " " * (MAX_RECORD + 1), "[" * 100000, "\xff", '{"m8d":2}', '{"m8d":1,"n":1}', '{"m8d":1,"n":1,"g":-1}',
        '{"m8d":1,"n":1,"g":1,"waiting":[]}', '{"m8d":1,"n":1,"g":1,"failures":{}}',
        '{"m8d":1,"n":1,"g":1,"waiting":{"n":1,"terms":[10000000000,"a","b"],"g":0,"token":"","claims":[]}}',
        '{"m8d":1,"n":1,"g":1,"waiting":{"n":1,"terms":[1,"a","b"],"g":0,"token":3,"claims":[]}}',
        '{"m8d":1,"n":1,"g":1,"waiting":{"n":1,"terms":[1,"a","b"],"g":0,"token":"","claims":[],"over":[1]}}',
        '{"m8d":1,"n":1,"g":1,"current":{"n":1,"terms":[1,"a","b"],"g":1,"token":"","claims":[]}}',
        with_claim([1, "i", "p", "h", 1, 1, "h", 0]), with_claim([0, "i", "p", "h", 1, -1, "h", 0]),
        with_claim([0, "i", "p", "h", 1, 1, "h", True]), with_claim([0, "i", "p", "h", 1, 1, "h"]),
        with_claim([0, "i", "p", "h", 1, 1, "h", 0, 1]), with_claim([0, "i", "p", "h", 1, 1, "h", 0, []]),
        with_claim([0, "i", "p", "h", 1, 1, "h", 0, [1, "x"]]),
        with_claim([0, "i", "p", "h", 1, 1, "h", 0, [1, "x", 1]]),
        with_claim([0, "i", "p", "h", 1, 1, "h", 0, [1, "x", -1, 0]]),
        with_claim([0, "i", "p", "h", 1, 1, "h", 0, [1, "x", 1, 0], 0]),
    ],
)  # fmt: skip
def test_records_that_are_none(text):
    with pytest.raises(JoinError, match="cannot be read"):
        decode(text, "w")


@pytest.mark.parametrize("lane", [None, LaneAddress(1, "", 0), LaneAddress(2, "ab12", 40123, 1)])
def test_a_lane_s_address_is_read_as_it_was_written(lane):
    member = dataclasses.replace(ask(0).member, lane=lane)
    attempt = Attempt(1, Terms(1, "gloo", "cpu"), (Claim("i", member, 0),))
    (claim,) = decode(encode(Ledger(1, 0, attempt)), "w").current.claims
    assert claim.member == member


def lanes(*versions):
    addresses = [None if version is None else LaneAddress(version, "", 1) for version in versions]
    members = tuple(dataclasses.replace(ask(0).member, lane=each) for each in addresses)
    return Roster("w", 1, 0, members, bytes(16), 5.0)


@pytest.mark.parametrize(
    ("versions", "agreed"), [((1, 1), 1), ((2, 1, 3), 1), ((2, 2), 2), ((1, None), 0), ((None, None), 0)]
)
def test_members_speak_the_oldest_lane_among_them(versions, agreed):
    assert lanes(*versions).lane_version == agreed


@pytest.mark.parametrize(
    ("places", "one"),
    [("aaa", True), ("aab", False), ("a-a", False), ("---", False), ("a", True), ("aa.", False)],
)
def test_members_are_on_one_host_if_all_say_the_same_place(places, one):
    addresses = [None if each == "." else LaneAddress(2, each.replace("-", ""), 1) for each in places]
    members = tuple(dataclasses.replace(ask(0).member, lane=each) for each in addresses)
    assert Roster("w", 1, 0, members, bytes(16), 5.0).one_host is one


@pytest.mark.parametrize(
    ("options", "all_do"),
    [
        ((1, 1), True),
        ((1, 0), False),
        ((1, None), False),
        ((3, 3), True),
        ((3, 2), False),
        ((1, 2), True),  # the first is of a version that takes the other's number for this option
        ((0, 3), False),
    ],
)
def test_calls_are_compared_if_all_members_want_it(options, all_do):
    addresses = [None if each is None else LaneAddress(2, "", 1, each) for each in options]
    members = tuple(dataclasses.replace(ask(0).member, lane=each) for each in addresses)
    assert Roster("w", 1, 0, members, bytes(16), 5.0).checks is all_do


@pytest.mark.parametrize(("options", "all_do"), [((2, 3), True), ((2, 1), False), ((3, None), False)])
def test_they_meet_at_a_state_if_all_members_can(options, all_do):
    addresses = [None if each is None else LaneAddress(2, "", 1, each) for each in options]
    members = tuple(dataclasses.replace(ask(0).member, lane=each) for each in addresses)
    assert Roster("w", 1, 0, members, bytes(16), 5.0).meets is all_do


def test_claims_that_were_read_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(ledger_module, "_known", {})
    monkeypatch.setattr(ledger_module, "_MOST_KNOWN", 3)
    text = encode(active(ask(0), ask(1)))
    first = decode(text, "w").current.claims
    assert all(one is other for one, other in zip(first, decode(text, "w").current.claims, strict=True))
    for who in range(2, 9):
        decode(encode(active(ask(0, who=who), ask(1, who=who + 1))), "w")
        assert len(ledger_module._known) <= 3
    assert decode(text, "w").current.claims == first
