"""What members carry from one server of a list to the next, and who may make the next generation there."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.lifekit import seat
from kits.meetkit import MemoryStore, ask
from test_membership_assigned import A, B, C, active, again, claim, me, seats

from multiworld._core.membership import admission, majority, refusals
from multiworld._core.membership.admission import Move, Phase
from multiworld._core.membership.carrying import carried
from multiworld._core.membership.ledger import Failure, Ledger, decode, encode
from multiworld._core.membership.serving import STRIDE
from multiworld._net.stores.record import WorldRecord

TOKEN = "cd" * 16
FIRST, SECOND = Ledger(epoch=0), Ledger(epoch=STRIDE + 5)


def test_numbers_lie_in_the_range_of_the_epoch():
    ledger = active(SECOND, A, B, C)
    assert ledger.current.generation == ledger.current.number == STRIDE + 6
    assert decode(encode(ledger), "w") == ledger


def test_a_generation_is_carried_by_any_of_its_members():
    old = active(FIRST, A, B, C)
    new = carried(SECOND, old)
    assert new.current == old.current
    assert (new.last, new.epoch) == (1, STRIDE + 5)
    following = claim(new, again(old, A, 2), again(old, B, 2), dead=frozenset({me(C)}))
    assert following.current.generation == STRIDE + 6
    assert seats(following) == ["s0", "s1"]


def test_what_members_said_of_one_generation_adds_up_in_any_order():
    sealed = claim(FIRST, A, B, C)
    number = sealed.current.number
    said = [admission.ready(sealed, number, me(each)) for each in (A, B, C)]
    for order in ((0, 1, 2), (2, 0, 1)):
        new = SECOND
        for at in order:
            new = carried(new, said[at])
        assert new.current.active
        assert new.current.generation == 1


def test_a_claim_that_waits_goes_on():
    half = claim(FIRST, A)
    new = carried(claim(SECOND, B), half, me(A))
    assert [each.slot for each in new.waiting.claims] == ["s1", "s0"]
    assert carried(new, half, me(A)) == new, "once"
    alone = carried(SECOND, half, me(A))
    assert alone.waiting.number > STRIDE
    assert carried(SECOND, half, me(B)).waiting is None, "others bring their own"


def test_a_claim_of_the_sealed_attempt_does_not_wait_any_more():
    half = claim(FIRST, A, B)
    sealed = claim(half, C)
    new = carried(carried(SECOND, half, me(A)), sealed, me(C))
    assert new.waiting is None
    assert new.current.has(me(A))


def test_a_claim_that_was_counted_anew_is_in_the_attempt_that_was_sealed_with_it():
    """One member has read that it is sealed, the other has not, and comes to the new server first."""
    half = claim(FIRST, A, B)
    sealed = claim(half, C)
    anew = carried(SECOND, half, me(A))
    number = anew.waiting.number
    new = carried(anew, sealed, me(C))
    assert new.current.number < number
    state = admission.claim_state(new, number, me(A), A)
    assert (state.phase, state.attempt) == (Phase.SEALED, new.current)
    failed = admission.fail(new, number, me(A), Failure(0, "JoinError", "no"))
    assert failed.current is None
    assert failed.failure_of(new.current.number) is not None
    ready = new
    for each in (A, B, C):
        ready = admission.ready(ready, new.current.number, me(each))
    assert admission.over(ready, number, me(A)).current.over == (0,)


def test_a_later_generation_stays():
    first = active(FIRST, A, B, C)
    second = claim(first, again(first, A, 2), again(first, B, 2))
    new = carried(carried(SECOND, second), first)
    assert new.current.generation == 2
    assert new.before.generation == 1
    assert carried(carried(SECOND, first), second).current == second.current


def test_an_attempt_that_failed_stays_closed():
    first = active(FIRST, A, B, C)
    second = claim(first, again(first, A, 2), again(first, B, 2))
    why = Failure(0, "JoinAbandonedError", "gone")
    failed = admission.fail(second, second.current.number, me(A), why)
    for one, other in ((second, failed), (failed, second)):
        new = carried(carried(SECOND, one), other)
        assert new.current.generation == 1
        assert new.last == 2, "its number is used up"


def test_what_an_older_server_is_brought_is_left_out():
    new = active(SECOND, A, B, C)
    assert carried(Ledger(epoch=0), new) == Ledger(epoch=0)


# -- majorities -------------------------------------------------------------------------------------------------------

FIVE = [seat(who, 1, 5) for who in range(5)]


def reform(ledger, *who, dead=(), begins=True, **changes):
    """Members `who` of the five claim anew, and none else will come."""
    last = ledger.current.generation if ledger.before is None else ledger.before.generation
    gone = frozenset(me(FIVE[each]) for each in dead)
    lost = tuple(each for each in range(5) if each not in who)
    new = claim(
        ledger, *(again(ledger, FIVE[each], *lost, **changes) for each in who), dead=gone, begins=begins
    )
    return new.current.generation > last, new


@pytest.mark.parametrize(
    ("who", "dead", "goes_on"),
    [
        ((0, 1, 2), (), True),
        ((3, 4), (), False),
        ((3, 4), (2,), False),  # half of those that may live, without the first of them
        ((3, 4), (1, 2), True),
        ((0, 1), (4,), True),
        ((4,), (0, 1, 2, 3), True),
    ],
)
def test_a_majority_of_those_that_may_go_on_elsewhere(who, dead, goes_on):
    ledger = active(FIRST, *FIVE)
    assert reform(ledger, *who, dead=dead)[0] is goes_on
    one_store = dataclasses.replace(ledger, epoch=-1)
    assert reform(one_store, *who, dead=dead)[0], "one store has one record"


@pytest.mark.parametrize(
    ("who", "dead", "goes_on"),
    [
        ((3, 4), (1, 2), False),  # 0 may have gone on with them before they died
        ((3, 4), (0, 1, 2), True),  # none is left that could have
        ((0, 1, 2), (3,), True),  # a majority whatever the dead have done
        ((0, 1, 2), (3, 4), True),
        ((4,), (0, 1, 2), False),
        ((4,), (0, 1, 2, 3), True),
    ],
)
def test_the_dead_may_have_gone_on_with_members_that_have_not_told_the_store(who, dead, goes_on):
    ledger = active(FIRST, *FIVE)
    assert reform(ledger, *who, dead=dead, begins=False)[0] is goes_on
    gone = frozenset(me(FIVE[each]) for each in dead)
    assert majority.rests_on_store(ledger, gone)
    assert not majority.rests_on_store(ledger)


def test_a_world_of_which_nothing_is_known_has_no_voters_and_rests_on_the_store():
    assert majority.voters(FIRST) == ()
    assert majority.rests_on_store(FIRST)


def test_members_that_left_do_not_count():
    ledger = active(FIRST, *FIVE)
    assert reform(ledger, 3, 4, left=(0, 1, 2))[0]
    for each in FIVE[:3]:
        ledger = admission.over(ledger, ledger.current.number, me(each), left=True)
    assert reform(ledger, 3, 4)[0]


def test_newcomers_alone_do_not_follow_members_that_may_live():
    ledger = carried(SECOND, active(FIRST, A, B, C))
    newcomers = [seat(who, 2, 3) for who in (5, 6, 7)]
    ledger = claim(ledger, *newcomers)
    assert not majority.may_follow(ledger)
    assert majority.elsewhere(ledger) == 3
    assert majority.may_follow(ledger, frozenset(each.id for each in ledger.current.claims))


def test_a_world_begins_only_where_it_may():
    assert claim(FIRST, A, B, C, begins=False).current is None
    assert claim(FIRST, A, B, C).current is not None
    assert claim(Ledger(), A, B, C, begins=False).current is None  # a launcher's store that has moved
    assert claim(Ledger(), A, B, C).current is not None


@given(st.integers(0, 2**32))
@settings(max_examples=300)
def test_of_two_parts_with_a_server_each_one_goes_on(seed):
    """Wherever members are, gone, or have left: no two generations follow one, and no number is given twice."""
    draw = random.Random(seed)  # noqa: S311  (nothing secret)
    old = active(FIRST, *FIVE)
    where = [draw.choice("abx") for _ in FIVE]
    gone = {at for at in range(5) if where[at] == "x" and draw.random() < 0.7}
    made = []
    for part, epoch in (("a", 0), ("b", STRIDE)):
        who = [at for at in range(5) if where[at] == part]
        draw.shuffle(who)
        sees = {at for at in gone if draw.random() < 0.7}
        ledger = old if epoch == 0 else carried(Ledger(epoch=epoch), old)
        went_on, ledger = reform(ledger, *who, dead=sees) if who else (False, ledger)
        if went_on:
            made.append(ledger.current)
    assert len(made) <= 1
    if gone | {at for at in range(5) if where[at] == "a"} == set(range(5)):
        made_by_all = reform(old, *(at for at in range(5) if at not in gone), dead=gone)[0]
        assert made_by_all or len(gone) == 5


# -- the record -------------------------------------------------------------------------------------------------------


class Moving(MemoryStore):
    """A store that moves to another server when it is told to."""

    def __init__(self):
        super().__init__()
        self.epoch, self.users = 0, []

    def on_move(self, bring):
        self.users.append(bring)

    def move(self, epoch, server=None):
        server = MemoryStore() if server is None else server
        for each in self.users:
            each()(server, epoch)
        self.keys, self.epoch = server.keys, epoch
        return server


def test_a_record_moves_with_what_it_knows():
    store = Moving()
    record = WorldRecord(store, "w", lambda _: None, me=me(A))
    record.apply(lambda ledger: admission.claim(ledger, A, me(A), TOKEN))
    store.move(STRIDE + 5)
    assert record.ledger.waiting.has(me(A))
    move = record.apply(lambda ledger: admission.claim(ledger, B, me(B), TOKEN))
    assert {each.slot for each in move.ledger.waiting.claims} == {"s0", "s1"}


def test_nothing_is_written_by_the_numbers_of_a_server_that_is_gone():
    """A record that was empty at the first server is written when the second one is there."""
    store = Moving()
    record = WorldRecord(store, "w", lambda _: None)
    record.read()
    told = []

    def step(ledger):
        if not told:
            told.append(store.move(STRIDE + 5))
        return admission.claim(ledger, ask(0, 1), "me", TOKEN)

    assert record.apply(step).ledger.current.generation == STRIDE + 6


def test_two_that_move_at_once_both_arrive():
    server = MemoryStore()
    records = []
    for each in (A, B):
        store = Moving()
        record = WorldRecord(store, "w", lambda _: None, me=me(each))
        record.apply(lambda ledger, each=each: admission.claim(ledger, each, me(each), TOKEN))
        records.append((store, record))
    for store, _ in records:
        store.move(STRIDE + 5, server)
    for _, record in records:
        record.read()
        assert {each.slot for each in record.ledger.waiting.claims} == {"s0", "s1"}
    assert records[0][1].apply(Move).ledger == records[1][1].ledger


def prepared(ledger, *limits):
    """It was prepared beside one of three, whose members have said these limits; one of them has entered it."""
    now = dataclasses.replace(ledger.current, after=7, limits=limits, entered=(1,))
    return dataclasses.replace(ledger, current=now)


def test_limits_that_only_one_side_has_are_carried():
    old = active(FIRST, A, B, C)
    one, other = prepared(old, 3, 0, 5), prepared(old, 0, 4, 2)
    assert carried(one, other).current.limits == carried(other, one).current.limits == (3, 4, 5)


@pytest.mark.parametrize(("limits", "after", "entry"), [((3, 4, 5), 7, 5), ((3, 0, 5), 0, 0)])
def test_a_generation_that_is_remembered_was_active(limits, after, entry):
    """A new server hears of it first from a claim, which knows its members, and not that it was prepared."""
    whole = prepared(active(FIRST, A, B, C), *limits)
    remembered = claim(SECOND, again(whole, A))
    assert (remembered.current.generation, remembered.current.after) == (1, 0)
    there = dataclasses.replace(whole, epoch=STRIDE + 5)
    for new in (carried(remembered, whole), carried(there, remembered)):
        assert decode(encode(new), "w") == new
        assert new.current.active
        assert len(new.current.holders) == 3
        assert (new.current.after, new.current.entry) == (after, entry)


def test_a_member_without_the_state_is_a_member_and_the_record_says_so():
    """It was lost to it while another one's state was on its way."""
    old = active(FIRST, A, B, C)
    new = claim(old, again(old, A, 2, step=7), again(old, B, 2, step=None))
    assert decode(encode(new), "w") == new
    assert [each.step for each in new.current.claims] == [7, None]
    assert majority.may_follow(claim(old, again(old, B, 0, 2, step=None)), frozenset({me(A), me(C)}))
    assert admission.roster(new.current, A, me(A)).steps == (7, None)


def test_claims_of_fixed_ranks_stand_by_rank():
    two, zero = ask(2, 3), ask(0, 3)
    new = carried(claim(SECOND, two), claim(FIRST, zero), me(zero))
    assert [each.rank for each in new.waiting.claims] == [0, 2]


def test_who_waits_for_a_majority_is_told_so():
    waiting = claim(FIRST, A, B, begins=False).waiting
    assert waiting is not None
    assert "3 members of the generation before neither came" in str(refusals.late(waiting, A, 4.0, 3))
    assert "neither came" not in str(refusals.late(waiting, A, 4.0))


def test_who_waits_for_a_store_that_took_over_is_told_so():
    held = "members of its last generation (node 1)"
    waiting = claim(FIRST, A, B, begins=False).waiting
    assert waiting is not None
    assert f"its store is a new one: it waited for {held}" in str(refusals.late(waiting, A, 4.0, held=held))
    assert "its store is a new one" not in str(refusals.late(waiting, A, 4.0))
    assert f"waits for {held}" in refusals.awaited(waiting, A, 1.0, 3.0, held)
    assert "waits for members that may still come" in refusals.awaited(waiting, A, 1.0, 3.0)
