"""Letters: what members write for each other, as pure steps, and beside a record that many want to write."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.lifekit import seat
from kits.meetkit import MemoryStore, together

from multiworld._core.membership import admission
from multiworld._core.membership.admission import Move, Phase
from multiworld._core.membership.ledger import Attempt, Claim, Failure, Ledger
from multiworld._core.membership.letters import ClaimLetter, ReadyLetter, letter_from, letter_text, take_in
from multiworld._core.membership.roster import LaneAddress
from multiworld._net.stores import record
from multiworld._net.stores.letterbox import Letterbox
from multiworld._net.stores.record import TRIES, WorldRecord
from multiworld._net.stores.rendezvous import Rendezvous

TOKEN = "ab" * 16
MEMBERS = [seat(who, 2, 12) for who in range(12)]
A, B, C, *_ = MEMBERS


def me(request):
    return f"{request.seat}-again"


def world(*members):
    """The record of a world whose first generation, of these members, has just broken."""
    claims = tuple(
        Claim(f"id{rank}", dataclasses.replace(each.member, rank=rank), 0)
        for rank, each in enumerate(members)
    )
    now = Attempt(1, members[0].terms, claims, 1, TOKEN, ready=tuple(range(len(members))))
    return Ledger(number=1, last=1, current=now)


def again(ledger, request, *lost):
    """The request with which a survivor comes to the next generation."""
    now = ledger.current
    rank = next(each.rank for each in now.claims if each.member.process == request.process)
    return dataclasses.replace(
        request, past=tuple(each.member for each in now.claims), past_generation=1, past_rank=rank, lost=lost,
        last_generation=1,
    )  # fmt: skip


def claim_letter(ledger, request, **changes):
    claim = Claim(me(request), dataclasses.replace(request.member, rank=0), 1, request.past_generation)
    return dataclasses.replace(ClaimLetter(ledger.waiting.number, request.terms, claim), **changes)


@pytest.fixture
def opened():
    """A's claim has opened the attempt after the generation of A, B and C; with B's request for it."""
    broken = world(A, B, C)
    first = again(broken, A, 2)
    return admission.claim(broken, first, me(A), TOKEN).ledger, again(broken, B, 2)


# -- pure -------------------------------------------------------------------------------------------------------------


def test_a_letter_is_what_its_sender_would_have_written(opened):
    ledger, request = opened
    there = take_in(ledger, claim_letter(ledger, request))
    by_itself = admission.claim(ledger, request, me(request), TOKEN).ledger
    assert there == by_itself
    assert there.current.over == (0, 1), "a claim says that the generation before is over for its sender"


def test_its_sender_finds_nothing_more_to_write(opened):
    ledger, request = opened
    there = take_in(ledger, claim_letter(ledger, request))
    move = admission.claim(there, request, me(request), TOKEN)
    assert move.ledger is there
    assert move.attempt == there.waiting.number
    sealed = admission.seal(there, move.attempt, me(A), TOKEN)
    assert sealed.current.has(me(request))
    move = admission.claim(sealed, request, me(request), TOKEN)
    assert move.ledger is sealed
    assert admission.claim_state(sealed, move.attempt, me(request), request).phase is Phase.SEALED


def test_what_its_sender_alone_knows_it_still_writes(opened):
    ledger, _ = opened
    knows = again(world(A, B, C), B, 2)
    ledger = dataclasses.replace(ledger, current=dataclasses.replace(ledger.current, lost=()))
    there = take_in(ledger, claim_letter(ledger, knows))
    assert there.waiting.has(me(B))
    assert admission.claim(there, knows, me(B), TOKEN).ledger.current.lost == (2,)


def test_a_letter_is_taken_in_once(opened):
    ledger, request = opened
    letter = claim_letter(ledger, request)
    there = take_in(ledger, letter)
    assert take_in(there, letter) is there
    sealed = admission.seal(there, letter.attempt, me(A), TOKEN)
    assert take_in(sealed, letter) is sealed


@pytest.mark.parametrize(
    "change",
    [
        lambda letter: {"attempt": letter.attempt + 1},
        lambda letter: {"terms": dataclasses.replace(letter.terms, size=3)},
        lambda letter: {"claim": dataclasses.replace(letter.claim, was=0)},  # a newcomer
        lambda letter: {"claim": dataclasses.replace(letter.claim, was=7)},
        lambda letter: {
            "claim": dataclasses.replace(letter.claim, member=seat(9, 2, 12).member)
        },  # another process
        lambda letter: {"claim": dataclasses.replace(letter.claim, member=A.member)},  # its seat is taken
    ],
)
def test_a_claim_that_is_not_simply_added_is_its_senders_to_make(opened, change):
    ledger, request = opened
    letter = claim_letter(ledger, request)
    assert take_in(ledger, dataclasses.replace(letter, **change(letter))) is ledger


def test_no_claim_is_added_where_none_is_open_or_a_generation_works(opened):
    ledger, request = opened
    letter = claim_letter(ledger, request)
    closed = dataclasses.replace(ledger, waiting=None)
    assert take_in(closed, letter) is closed
    working = dataclasses.replace(
        ledger, waiting=dataclasses.replace(
            ledger.waiting, claims=tuple(dataclasses.replace(each, working=True) for each in ledger.waiting.claims)
        )
    )  # fmt: skip
    assert take_in(working, letter) is working


def test_ready_is_said_in_the_attempt_that_it_is_of(opened):
    ledger, request = opened
    there = take_in(ledger, claim_letter(ledger, request))
    sealed = admission.seal(there, 2, me(A), TOKEN)
    assert take_in(sealed, ReadyLetter(2, me(B))).current.ready == (1,)
    for letter in (ReadyLetter(1, me(B)), ReadyLetter(3, me(B)), ReadyLetter(2, "stranger")):
        assert take_in(sealed, letter) is sealed


def test_letters_are_text(opened):
    ledger, request = opened
    with_lane = dataclasses.replace(request, lane=LaneAddress(2, "here", 1234, 1))
    for letter in (claim_letter(ledger, request), claim_letter(ledger, with_lane), ReadyLetter(5, "x")):
        text = letter_text(letter)
        assert text.isascii()
        assert "\n" not in text
        assert letter_from(text) == letter


@given(st.text())
def test_what_is_no_letter_is_none(text):
    assert letter_from(text) is None or text.strip().startswith("[")


@pytest.mark.parametrize(
    "text", ["[]", "[1]", '[true,"x"]', "[1,2]", "[1,[],[]]", '[1,[2,"gloo"],[1,2]]', "[" * 9999, "{}"]
)
def test_what_looks_like_one_is_none(text):
    assert letter_from(text) is None


# -- the box ----------------------------------------------------------------------------------------------------------


class Texts(dict):
    def peek(self, key):
        return self.get(key, "")

    def append(self, key, text):
        self[key] = self.peek(key) + text
        return True


def test_a_box_has_what_is_posted_for_an_attempt_and_not_withdrawn():
    store = Texts()
    one, other = (Letterbox(store, "root", each) for each in ("one", "other"))
    assert one.post(ReadyLetter(3, "one"))
    assert other.post(ReadyLetter(3, "other"))
    assert other.post(ReadyLetter(4, "other"))
    assert one.letters(3) == [ReadyLetter(3, "one"), ReadyLetter(3, "other")]
    other.withdraw()
    assert one.letters(3) == [ReadyLetter(3, "one")]
    assert one.letters(4) == []
    assert not other.withdraw(), "it has"
    assert other.post(ReadyLetter(3, "other"))
    assert one.letters(3)[1:] == [ReadyLetter(3, "other")]
    assert {*one.keys, *other.keys} == set(store)


def test_lines_that_are_no_letters_are_passed_over():
    store = Texts({"root/letters/1": 'junk\n\n-\n[1,"x"]\n[1,"torn'})
    assert Letterbox(store, "root", "me").letters(1) == [ReadyLetter(1, "x")]


def test_nobody_posts_where_the_store_cannot_append():
    class Plain(Texts):
        def append(self, key, text):
            return False

    box = Letterbox(Plain(), "root", "me")
    assert not box.post(ReadyLetter(1, "me"))
    box.withdraw()
    assert box.keys == ()


# -- beside a record --------------------------------------------------------------------------------------------------


class Contended(MemoryStore):
    """As often as it is told, another member replaces the record just before a compare-and-set that would have."""

    def __init__(self, times=0):
        super().__init__()
        self.times = times
        self.rival = WorldRecord(self, "w", time.sleep)

    def compare_set(self, key, expected, desired, /):
        if (
            self.times
            and key.endswith("/record")
            and desired != record._NOTHING
            and expected == self.keys.get(key)
        ):
            self.times -= 1
            times, self.times = self.times, 0
            self.rival.apply(lambda ledger: Move(dataclasses.replace(ledger, number=ledger.number + 1)))
            self.times = times
        return super().compare_set(key, expected, desired)


def ready_world(count):
    """A sealed attempt of so many members, none of them ready."""
    now = dataclasses.replace(world(*MEMBERS[:count]).current, ready=())
    return Ledger(number=1, last=1, current=now)


def says_ready(one, rank):
    return one.apply(
        lambda ledger: Move(admission.ready(ledger, 1, f"id{rank}")), lambda _: ReadyLetter(1, f"id{rank}")
    )


def test_who_comes_too_late_several_times_leaves_a_letter_and_takes_in_those_of_others():
    store = Contended()
    one, other, third = (WorldRecord(store, "w", lambda _: None, me=f"id{rank}") for rank in range(3))
    one.apply(lambda _: Move(ready_world(3)))
    for quiet in range(TRIES + 1):
        store.times = quiet
        other.apply(
            lambda ledger: Move(dataclasses.replace(ledger, last=ledger.last + 1)),
            lambda _: ReadyLetter(1, "id1"),
        )
        assert not any("letters" in key for key in store.keys), "it was not late often enough"
    third.box.post(ReadyLetter(1, "id2"))
    store.times = TRIES + 1
    move = says_ready(one, 0)
    assert move.ledger.current.ready == (0, 2)
    assert move.ledger == one.ledger
    assert one.box.letters(1) == [ReadyLetter(1, "id2"), ReadyLetter(1, "id0")]


def test_who_finds_its_letter_taken_in_writes_no_more():
    store = Contended()

    def sleep(_seconds):  # while one waits another member comes, and takes its letter in
        store.times = TRIES + 1
        says_ready(other, 1)

    one = WorldRecord(store, "w", sleep, me="id0")
    other = WorldRecord(store, "w", lambda _: None, me="id1")
    one.apply(lambda _: Move(ready_world(3)))
    store.times = TRIES + 1
    before = len(store.keys)
    move = says_ready(one, 0)
    assert move.ledger.current.ready == (0, 1)
    assert len(store.keys) == before + 1


def test_a_withdrawn_claim_is_not_written_by_one_who_has_read_it_before():
    """The reader has the record from before the withdrawal: its compare-and-set finds another, and it reads anew."""
    store = Contended()
    reader, sender = (WorldRecord(store, "w", lambda _: None, me=f"id{rank}") for rank in range(2))
    reader.apply(lambda _: Move(ready_world(3)))
    sender.box.post(ReadyLetter(1, "id1"))
    had = []

    def letters_and_then_withdrawn(attempt):
        found = Letterbox.letters(reader.box, attempt)
        if not had:
            had.extend(found)
            sender.box.withdraw()
            sender.apply(lambda ledger: Move(dataclasses.replace(ledger, last=ledger.last + 1)))
        return found

    reader.box.letters = letters_and_then_withdrawn
    store.times = TRIES + 1
    move = says_ready(reader, 0)
    assert ReadyLetter(1, "id1") in had
    assert move.ledger.current.ready == (0,)


def test_who_gives_up_with_a_letter_on_its_way_replaces_the_record(opened):
    """Its claim is not there yet. Who has read its letter finds another record than it has read, and no letter."""
    ledger, request = opened
    store = MemoryStore()
    WorldRecord(store, "w", time.sleep).apply(lambda _: Move(ledger))
    one = Rendezvous(store, request, deadline=time.monotonic() + 60, probe=lambda *_: {})
    one._record.read()
    before = one._record.ledger
    failure = Failure(0, "JoinAbandonedError", "it gave up")
    one._leave(failure)
    one._record.read()
    assert one._record.ledger == before, "it has left no letter, and has no claim"
    one._record.box.post(one._claim_letter(before))
    one._leave(failure)
    after = one._record.ledger
    assert (after.waiting, after.current) == (before.waiting, before.current)
    assert after.number > before.number
    assert one._record.box.letters(before.waiting.number) == []
    one._leave(failure)
    assert one._record.ledger == after, "once is enough"


def test_who_gives_up_when_its_letter_was_taken_in_takes_its_claim_back(opened):
    ledger, request = opened
    store = MemoryStore()
    one = Rendezvous(store, request, deadline=time.monotonic() + 60, probe=lambda *_: {})
    letter = one._claim_letter(ledger)
    WorldRecord(store, "w", time.sleep).apply(lambda _: Move(take_in(ledger, letter)))
    one._record.box.post(letter)
    one._record.read()
    assert one._record.ledger.waiting.has(letter.me)
    one._leave(Failure(0, "JoinAbandonedError", "it gave up"))
    assert [each.id for each in one._record.ledger.waiting.claims] == [me(A)]


@pytest.mark.parametrize(("rank", "lost", "turn"), [(0, (), 0), (3, (), 3), (3, (0, 2, 5), 1), (0, (1,), 0)])
def test_survivors_take_turns_in_the_order_of_their_ranks(rank, lost, turn):
    assert dataclasses.replace(A, past_rank=rank, lost=lost).turn == turn


class Slow(MemoryStore):
    """In the time of a compare-and-set others write: of those that have read the same record one succeeds."""

    def __init__(self):
        super().__init__()
        self.lost = 0

    def compare_set(self, key, expected, desired, /):
        time.sleep(1e-3)
        found = super().compare_set(key, expected, desired)
        self.lost += key.endswith("/record") and desired != record._NOTHING and found != desired.encode()
        return found


def test_many_survivors_that_come_at_once_agree_and_leave_no_letters(monkeypatch):
    taken = []

    def take(ledger, letter):
        there = take_in(ledger, letter)
        taken.extend([letter] if there is not ledger else [])
        return there

    monkeypatch.setattr(record, "take_in", take)
    store, broken = Slow(), world(*MEMBERS)
    WorldRecord(store, "w", time.sleep).apply(lambda _: Move(broken))
    lost = len(MEMBERS) - 1

    def reform(request):
        def run():
            one = Rendezvous(
                store, again(broken, request, lost), deadline=time.monotonic() + 60,
                probe=lambda endpoints, _: dict.fromkeys(endpoints, True),
            )  # fmt: skip
            roster = one.agree()
            one.commit()
            barrier.wait(60)
            one.over()
            return roster

        return run

    barrier = threading.Barrier(lost)
    rosters = together(*(reform(each) for each in MEMBERS[:lost]))
    assert {each.generation for each in rosters} == {2}
    assert [each.rank for each in rosters] == list(range(lost))
    assert {each.members for each in rosters} == {rosters[0].members}
    assert [each.seat for each in rosters[0].members] == [each.seat for each in MEMBERS[:lost]]
    # Of its claim or that it is ready: which of them come too late is the threads' to say.
    assert taken, f"{store.lost} came too late, and none left a letter"
    assert not any("letters" in key for key in store.keys)
