"""The rendezvous in real time, on a store in memory."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import pytest
from kits.lifekit import seat
from kits.meetkit import PATIENCE, Clock, MemoryStore, ask, together, until
from test_membership_assigned import active, again

from multiworld._core.membership.admission import Move
from multiworld._core.membership.ledger import Ledger, decode
from multiworld._core.membership.roster import Endpoint
from multiworld._net.patience import NoAnswerError, in_time
from multiworld._net.stores import probe as probing
from multiworld._net.stores import rendezvous as module
from multiworld._net.stores.probe import answers
from multiworld._net.stores.record import WorldRecord
from multiworld._net.stores.rendezvous import Rendezvous
from multiworld.errors import (
    BackendError,
    BrokenWorldException,
    InvalidJoinError,
    JoinAbandonedError,
    JoinError,
    JoinTimeoutError,
    MismatchError,
    RankTakenError,
    StaleGenerationError,
    StoreUnreachableError,
)
from multiworld.logs import source
from multiworld.logs.limit import RateLimit


def everybody(endpoints, within):
    """All processes that ever joined still exist."""
    return dict.fromkeys(endpoints, True)


def nobody(endpoints, within):
    """None does."""
    return dict.fromkeys(endpoints, False)


def way(store, request, timeout=PATIENCE, *, clock=time.monotonic, **options):
    options = {"probe": everybody} | options
    return Rendezvous(store, request, deadline=clock() + timeout, clock=clock, **options)


def joined(store, *requests):
    """Ways of members that are active together, and their rosters."""
    ways = [way(store, request) for request in requests]

    def join(one):
        roster = one.agree()
        one.commit()
        return roster

    rosters = together(*((lambda one=one: join(one)) for one in ways))
    assert not [error for error in rosters if isinstance(error, BaseException)]
    return ways, rosters


def record(store, world="w"):
    return decode(store.keys.get(f"m8d/{world}/record", ""), world)


def no_threads():
    until(lambda: not [each for each in threading.enumerate() if each.name == "m8d-rendezvous"])


SHORT = {name: getattr(module, name) for name in ("_SLACK", "_LAST_WORDS", "PARTING")}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    # A busy machine may need longer for last words than the fractions of a second that they have; what happens then
    # (the store is said not to answer) is tested with `short`.
    for name in SHORT:
        monkeypatch.setattr(module, name, PATIENCE)
    yield
    no_threads()


@pytest.fixture
def short(clean, monkeypatch):
    for name, seconds in SHORT.items():
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def clock():
    return Clock()


def test_three_members():
    store = MemoryStore()
    ways, rosters = joined(store, *(ask(rank, 3) for rank in range(3)))
    assert [roster.rank for roster in rosters] == [0, 1, 2]
    assert len({(roster.members, roster.token, roster.generation) for roster in rosters}) == 1
    assert {one.prefix for one in ways} == {"m8d/w/1/pg"}
    for one in ways:
        one.check()


def test_a_world_of_one_takes_three_round_trips():
    store = MemoryStore()
    joined(store, ask(0, 1))
    assert store.calls == 3


def test_names_are_quoted_and_worlds_never_mix():
    store = MemoryStore()
    names = ["a/b", "a", "a/b/1", "ä\n", "%61", "\ud800", "w" * 200]
    ways = [joined(store, *(ask(rank, world=name) for rank in range(2)))[0] for name in names]
    assert len({one[0].prefix for one in ways}) == len(names)
    assert all(key.isascii() and key.count("/") == 2 for key in store.keys)
    assert len(store.keys) == len(names)


def test_a_thousand_generations_leave_one_key():
    store = MemoryStore()
    for generation in range(1, 1001):
        one = way(store, ask(0, 1))
        assert one.agree().generation == generation
        store.keys[one.prefix + "/0"] = "x"
        one.commit()
        one.over([one.prefix + "/0"])
    assert list(store.keys) == ["m8d/w/record"]
    assert len(store.keys["m8d/w/record"]) < 100


def test_broken_and_joined_again_many_times():
    store = MemoryStore()
    last = 0
    for cycle in range(30):
        # Rank 1 crashes every time, and another process comes for it.
        ways, rosters = joined(
            store, ask(0, 2, last_generation=last, held_rank=0 if last else None), ask(1, 2, who=10 + cycle)
        )
        assert rosters[0].generation == last + 1
        last = rosters[0].generation
        ways[0].over()
    assert list(store.keys) == ["m8d/w/record"]
    assert len(store.keys["m8d/w/record"]) < 1000


def test_the_numbers_go_on_in_a_new_store():
    _, rosters = joined(MemoryStore(), ask(0, last_generation=4, held_rank=0), ask(1, 2, who=9))
    assert {roster.generation for roster in rosters} == {5}


def test_the_store_is_replaced_while_a_member_waits():
    store = MemoryStore()
    one = way(store, ask(0))

    def replace():
        until(lambda: record(store).waiting is not None)
        store.keys.clear()

    error, _ = together(one.agree, replace)
    assert isinstance(error, JoinAbandonedError)
    assert "the store knows no more" in str(error)


def test_a_replacement_that_comes_before_the_survivors_have_noticed():
    store = MemoryStore()
    ways, _ = joined(store, ask(0), ask(1))

    def survivor():
        until(lambda: record(store).waiting is not None)
        time.sleep(0.1)  # it looks around a few times; a shorter wait tests less, and fails nothing
        ways[0].over()
        return way(store, ask(0, last_generation=1, held_rank=0)).agree()

    early = way(store, ask(1, who=9))
    rosters = together(early.agree, survivor)
    assert [roster.generation for roster in rosters] == [2, 2]


def test_a_stale_member_is_refused_at_once():
    store = MemoryStore()
    ways, _ = joined(store, ask(0), ask(1))
    ways[0].over()
    joined(store, ask(0, last_generation=1, held_rank=0), ask(1, who=9))
    began = time.monotonic()
    with pytest.raises(
        StaleGenerationError, match=r"held rank 1 of world 'w' in generation 1, .* generation 2"
    ):
        way(store, ask(1, last_generation=1, held_rank=1)).agree()
    assert time.monotonic() - began < PATIENCE / 2
    assert record(store).waiting is None


def test_a_stale_member_that_waits_is_refused_when_the_others_become_active():
    store = MemoryStore()
    ways, _ = joined(store, ask(0), ask(1))
    ways[0].over()
    others = [way(store, ask(0, last_generation=1)), way(store, ask(1, who=9))]
    together(*(one.agree for one in others))
    late = way(store, ask(1, last_generation=1, held_rank=1))

    def commit():
        time.sleep(0.2)
        return together(*(one.commit for one in others))

    assert isinstance(together(late.agree, commit)[0], StaleGenerationError)
    assert record(store).waiting is None


def test_a_rank_out_of_range_is_told_to_those_who_wait():
    store = MemoryStore()

    def wrong():
        until(lambda: record(store).waiting is not None)
        way(store, ask(2, 2, who=9)).agree()

    began = time.monotonic()
    errors = together(way(store, ask(0)).agree, wrong)
    assert [type(error) for error in errors] == [InvalidJoinError, InvalidJoinError]
    assert "rank=2" in str(errors[0])
    assert "host9, pid 1009" in str(errors[0])
    assert time.monotonic() - began < PATIENCE / 2


def test_a_rank_out_of_range_does_not_touch_an_active_generation(monkeypatch):
    monkeypatch.setattr(module, "REFUSING", 0.1)  # it finds nobody to tell
    store = MemoryStore()
    ways, _ = joined(store, ask(0), ask(1))
    before = dict(store.keys)
    with pytest.raises(InvalidJoinError):
        way(store, ask(2, 2, who=9)).agree()
    assert store.keys == before
    ways[0].check()


def test_other_impossible_requests_need_no_store(monkeypatch):
    monkeypatch.setattr(module, "REFUSING", 0.1)

    class Never(MemoryStore):
        def _called(self):
            raise AssertionError

    with pytest.raises(InvalidJoinError):
        way(Never(), ask(0, world="")).agree()


def test_a_claim_is_contested_until_the_newcomers_timeout():
    store = MemoryStore()
    dead = way(store, ask(1))
    dead._claim(None)
    with pytest.raises(RankTakenError, match="claimed twice"):
        way(store, ask(1, who=9), timeout=0.3).agree()
    assert record(store).waiting is not None, "the others are not concerned"


def test_a_member_that_died_while_it_waited_is_left_out():
    store = MemoryStore()
    way(store, ask(1))._claim(None)
    dead = ask(1).endpoint

    def probe(endpoints, within):
        return {endpoint: endpoint != dead for endpoint in endpoints}

    late = way(store, ask(0), probe=probe)

    def again():
        time.sleep(0.3)
        return way(store, ask(1, who=9), probe=probe).agree()

    rosters = together(late.agree, again)
    assert [member.pid for member in rosters[0].members] == [1000, 1009]
    assert rosters[1].generation == 1


def test_a_dead_process_disagrees_with_nobody():
    store = MemoryStore()
    way(store, ask(0, 3))._claim(None)
    assert way(store, ask(0, 1, who=9), probe=nobody).agree().size == 1


def test_a_member_that_dies_as_the_last_one_comes_is_dropped_by_those_who_wait():
    store = MemoryStore()
    other = way(store, ask(1, 2), timeout=0.5)
    first = way(store, ask(0, 2), probe=nobody, timeout=0.5)
    other._claim(None)
    assert record(store).waiting.missing == (0,)
    first._record.read()
    first._of_interest = lambda waiting: ()
    first._claim(None)
    assert record(store).waiting.missing == ()
    assert not first._seal()
    assert record(store).waiting.missing == (1,)
    first.fail(ValueError("enough"))


def test_a_failure_after_the_agreement_reaches_those_who_commit_and_those_who_check():
    store = MemoryStore()
    ways = [way(store, ask(rank, 3)) for rank in range(3)]
    together(*(one.agree for one in ways))

    def fail():
        time.sleep(0.1)
        ways[0].fail(BackendError("w", "no such backend", rule="rule", next_step="step"), ["a", "b"])

    def check():
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ways[2].check()
            time.sleep(0.001)

    store.keys |= {"a": "1", "c": "1"}
    errors = together(fail, ways[1].commit, check)
    assert [type(error) for error in errors] == [type(None), BackendError, BackendError]
    assert errors[1].value.endswith("could not join: no such backend")
    assert (errors[1].rule, errors[1].next_step) == ("rule", "step")
    assert set(store.keys) == {"m8d/w/record", "c"}
    for one in ways:
        one.fail(ValueError("late"))  # says nothing new, and never raises
        one.over()
    assert [each.kind for each in record(store).failures] == ["BackendError"]


def test_checking_is_rare(clock):
    store = MemoryStore()
    ways = [way(store, ask(rank), clock=clock) for rank in range(2)]
    ways[0].check()  # before there is an attempt
    together(*(one.agree for one in ways))
    calls = store.calls
    for _ in range(100):
        clock.now += 0.001
        ways[0].check()
    assert calls + 9 <= store.calls <= calls + 11
    for one in ways:
        one.fail(ValueError("enough"))


def test_a_member_that_is_not_ready_in_time(clock):
    store = MemoryStore()
    ways = [way(store, ask(rank), timeout=0.6, given=15.0, clock=clock) for rank in range(2)]
    together(*(one.agree for one in ways))
    clock.now += 0.7
    with pytest.raises(JoinTimeoutError, match=r"had left of its timeout of 15 s; not ready: rank 1"):
        ways[0].commit()
    with pytest.raises(JoinTimeoutError, match="rank 0"):
        ways[1].check()


def test_a_member_that_is_known_to_be_dead_is_not_waited_for():
    store = MemoryStore()
    ways = [way(store, ask(rank, 3)) for rank in range(3)]
    together(*(one.agree for one in ways))
    lost = BrokenWorldException("w", "rank 2 is gone", generation=1, cause="crashed", ranks=(2,))
    noticed = threading.Event()

    def check():
        if noticed.is_set():
            raise lost

    def sees_it():
        with pytest.raises(BrokenWorldException) as raised:
            ways[0].commit(check)
        ways[0].fail(raised.value)

    began = time.monotonic()
    threading.Timer(0.2, noticed.set).start()
    errors = together(sees_it, ways[1].commit)
    assert errors[0] is None
    assert isinstance(errors[1], JoinAbandonedError)
    assert "rank 2 is gone" in str(errors[1])
    assert time.monotonic() - began < PATIENCE / 2
    assert record(store).waiting is None


def test_a_member_that_was_active_and_has_left_leaves_the_others_active():
    store = MemoryStore()
    ways = [way(store, ask(rank)) for rank in range(2)]
    together(*(one.agree for one in ways))

    def check():
        # All this happens between two of the other's looks at the record.
        ways[0].commit()
        ways[0].over()
        raise BrokenWorldException("w", "rank 0 left", generation=1, cause="left", ranks=(0,))

    ways[1].commit(check)
    ways[1].over()
    assert joined(store, ask(0), ask(1))[1][0].generation == 2


def test_checking_after_the_deadline(clock):
    store = MemoryStore()
    ways = [way(store, ask(rank), timeout=0.3, clock=clock) for rank in range(2)]
    together(*(one.agree for one in ways))
    clock.now += 0.35
    with pytest.raises(JoinTimeoutError):
        ways[0].check()
    with pytest.raises(JoinTimeoutError):
        ways[1].commit()


@pytest.mark.parametrize("where", ["agree", "check", "commit"])
def test_cancelling(where):
    store = MemoryStore()
    stop = threading.Event()
    ways = [way(store, ask(0), cancelled=stop.is_set), way(store, ask(1))]

    agreed = []

    def go(one):
        one.agree()
        agreed.append(one)
        if where == "check":
            while True:
                one.check()
                time.sleep(0.001)
        if one is ways[1]:
            until(lambda: record(store).failures)
        one.commit()

    def cancel():
        until(lambda: record(store).waiting is not None if where == "agree" else len(agreed) == 2)
        time.sleep(0.05)  # it goes on; a shorter wait tests less, and fails nothing
        stop.set()

    if where == "agree":
        errors = together(lambda: go(ways[0]), cancel)
        assert record(store).waiting is None
    else:
        errors = together(lambda: go(ways[0]), cancel, lambda: go(ways[1]))
        assert isinstance(errors[2], JoinAbandonedError)
    assert isinstance(errors[0], JoinAbandonedError)
    assert "gave up" in str(errors[0])


def test_cancelled_while_another_holds_the_rank():
    store = MemoryStore()
    way(store, ask(0))._claim(None)
    with pytest.raises(JoinAbandonedError):
        way(store, ask(0, who=9), cancelled=lambda: True).agree()


def test_a_member_that_failed_to_see_the_others_become_active_ends_the_generation():
    store = MemoryStore()
    ways = [way(store, ask(rank)) for rank in range(2)]
    together(*(one.agree for one in ways))
    for one in ways:
        rank = one.request.rank
        one._record.apply(lambda ledger, one=one, rank=rank: module.Move(
            module.admission.ready(ledger, one._number, one._me)
        ))  # fmt: skip
    ways[1].fail(ValueError("the answer got lost"))
    assert record(store).current.over == (1,)


def test_fail_on_an_active_generation_is_over():
    store = MemoryStore()
    ways, _ = joined(store, ask(0), ask(1))
    ways[1].fail(ValueError("x"))
    assert record(store).current.over == (1,)


def test_over_before_the_end_of_the_join_is_a_failure():
    store = MemoryStore()
    ways = [way(store, ask(rank)) for rank in range(2)]
    together(*(one.agree for one in ways))
    ways[0].over()
    with pytest.raises(JoinAbandonedError, match="closed while it was joined"):
        ways[1].commit()


def test_garbage_in_the_store():
    for junk in ("garbage", "\xff", "{}"):
        store = MemoryStore()
        store.keys["m8d/w/record"] = junk
        with pytest.raises(JoinError, match="cannot be read"):
            way(store, ask(0)).agree()
        assert store.keys["m8d/w/record"] == junk


def test_a_store_that_fails():
    class Broken(MemoryStore):
        def _called(self):
            super()._called()
            if self.calls > 3:
                raise ConnectionResetError("gone")

    with pytest.raises(StoreUnreachableError, match="ConnectionResetError: gone"):
        way(Broken(), ask(0)).agree()


def test_a_stores_own_join_error_is_raised_as_it_is():
    class Closed(MemoryStore):
        def _called(self):
            raise StoreUnreachableError("w", "closed")

    with pytest.raises(StoreUnreachableError, match=r"^closed\.$"):
        way(Closed(), ask(0)).agree()


class Stuck(MemoryStore):
    """Answers so many calls; then none, until it is let go."""

    def __init__(self, calls):
        super().__init__()
        self.stuck, self.free = threading.Event(), threading.Event()
        self.left = calls

    def _called(self):
        super()._called()
        self.left -= 1
        if self.left < 0:
            self.stuck.set()
            self.free.wait(3 * PATIENCE)


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_store_that_does_not_answer_costs_no_more_than_the_timeout(calls, clock, short):
    store = Stuck(calls)
    began = time.monotonic()

    def wait_in_vain():
        assert store.stuck.wait(PATIENCE)
        clock.now += 1.0

    error, _ = together(way(store, ask(0), timeout=0.5, clock=clock).agree, wait_in_vain)
    assert isinstance(error, StoreUnreachableError)
    assert "no answer" in str(error)
    assert time.monotonic() - began < 2 * PATIENCE
    store.free.set()
    no_threads()
    assert record(store).waiting is None, "a claim that gets through too late is taken back"


def test_the_time_was_over_before_it_began(clock):
    """As where opening the store took all of it: the store answers, so who is missing is what is wrong."""
    one = way(MemoryStore(), ask(0, 3), timeout=1.0, clock=clock)
    clock.now += 10 * PATIENCE
    with pytest.raises(JoinTimeoutError, match="missing: ranks 1, 2"):
        one.agree()


def test_parting_from_a_store_that_does_not_answer(short):
    store = Stuck(3)
    one = way(store, ask(0, 1))
    one.agree()
    one.commit()
    began = time.monotonic()
    one.over()
    assert time.monotonic() - began < PATIENCE
    store.free.set()


def test_cancelled_while_the_store_does_not_answer(short):
    store = Stuck(0)
    stop = threading.Event()
    began = time.monotonic()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    with pytest.raises(StoreUnreachableError):
        way(store, ask(0), timeout=2 * PATIENCE, cancelled=stop.is_set).agree()
    assert time.monotonic() - began < PATIENCE
    store.free.set()
    timer.join()


def test_interrupted_from_the_keyboard_nothing_stays_behind():
    store = MemoryStore()

    def interrupted():
        if record(store).waiting is not None and threading.current_thread().name != "m8d-rendezvous":
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        way(store, ask(0), cancelled=interrupted).agree()
    no_threads()
    assert record(store).waiting is None


def test_who_is_missing_is_logged_less_and_less_often(caplog, clock, monkeypatch):
    # Other tests have waited for a world of this name.
    monkeypatch.setattr(source._LIMITED, "_limit", RateLimit())
    store, slept = MemoryStore(), []

    def sleep(seconds):
        slept.append(seconds)
        clock.now += 0.25

    with pytest.raises(JoinTimeoutError):
        way(store, ask(1, 4), timeout=60, clock=clock, sleep=sleep).agree()
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 4, "after 5, 10, 20 and 40 s"
    assert "waits for ranks 0, 2, 3 (1 of 4 members are there): 5 s so far, 55 s are left" in said[0]


def test_a_member_that_lives_where_its_address_leads_nowhere(clock):
    """Members of two hosts that both say loopback: they hear of each other's life through the store only."""
    store = MemoryStore()
    both = [ask(rank, endpoint=Endpoint("127.0.0.1", 1000 + rank)) for rank in range(2)]
    errors = together(*(way(store, each, probe=nobody, timeout=PATIENCE).agree for each in both))
    for error in errors:
        assert isinstance(error, MismatchError), error
        assert "host0" in str(error)
        assert "host1" in str(error)
        assert str(error).count("127.0.0.1") == 2
    assert record(store).waiting is None


def test_runs_never_mix():
    store = MemoryStore()
    runs = ["", "a", "b", "a@w", "none"]
    rosters = [joined(store, *(ask(rank, run=run) for rank in range(2)))[1] for run in runs]
    assert [each[0].generation for each in rosters] == [1] * len(runs)
    assert len({each[0].token for each in rosters}) == len(runs)


def test_a_member_of_another_run_is_missed(clock):
    store = MemoryStore()

    def sleep(seconds):
        clock.now += 0.25

    with pytest.raises(
        JoinTimeoutError, match=r"missing: rank 1.*only members of run 'a' \(M8D_RUN_ID\) are seen"
    ):
        way(store, ask(0, run="a"), timeout=5, clock=clock, sleep=sleep).agree()


def test_interrupted_while_its_thread_starts(monkeypatch):
    store = MemoryStore()
    start = threading.Thread.start

    def interrupted(self):
        start(self)
        until(lambda: record(store).waiting is not None)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        way(store, ask(0), timeout=4 * PATIENCE).agree()
    no_threads()
    assert record(store).waiting is None, "the others wait for a member that will not come"


def test_no_thread_can_be_started(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoAnswerError, match="not asked: can't create new thread"):
        in_time(
            lambda: 1, deadline=1.0, clock=lambda: 0.0, hurry=lambda: False, give_up=lambda: None, parting=0.1,
            last_words=0.1,
        )  # fmt: skip
    with pytest.raises(JoinAbandonedError, match=r"not asked: can't create new thread.*\(ulimit -u\)"):
        way(MemoryStore(), ask(0), timeout=PATIENCE).agree()


def test_a_process_that_stood_still_at_the_deadline_still_hears_the_answer():
    gave_up = []
    go, clock = threading.Event(), Clock()

    def hurry():
        clock.now += 10  # it stood still, between two looks
        go.set()
        return False

    def answer():
        go.wait(PATIENCE)
        return 7

    arguments = {"clock": clock, "hurry": hurry, "give_up": lambda: gave_up.append(1)}
    assert in_time(answer, deadline=clock.now + 1, parting=PATIENCE, last_words=0, **arguments) == 7
    assert not gave_up


def test_many_worlds_at_once_in_any_order():
    store = MemoryStore()
    names = [f"w{number}" for number in range(8)]

    def member(rank):
        calls = [way(store, ask(rank, 3, world=name)) for name in names]
        calls = calls[rank:] + calls[:rank]

        def one(each):
            roster = each.agree()
            each.commit()
            return roster

        return together(*((lambda each=each: one(each)) for each in calls))

    for rosters in together(*((lambda rank=rank: member(rank)) for rank in range(3))):
        assert sorted(roster.world for roster in rosters) == names


def test_sixteen_members():
    _, rosters = joined(MemoryStore(), *(ask(rank, 16) for rank in range(16)))
    assert len({roster.token for roster in rosters}) == 1


# The probe.


def test_who_answers():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        closed = socket.create_server(("127.0.0.1", 0))
        there, gone = (Endpoint("127.0.0.1", sock.getsockname()[1]) for sock in (listener, closed))
        closed.close()
        odd = [
            Endpoint("nowhere.invalid", 1),
            Endpoint("127.0.0.1", 70000),
            Endpoint("::x", 1),
        ]
        began = time.monotonic()
        found = answers([there, gone, *odd], 0.5)
        assert found == {there: True, gone: False} | dict.fromkeys(odd)
        assert time.monotonic() - began < PATIENCE
        assert answers([], 0.5) == {}


def test_who_answers_a_prober_that_stands_still(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        class Late:
            calls = 0

            def monotonic(self):
                self.calls += 1
                if self.calls == 1:
                    return 0.0
                assert select.select([listener], [], [], PATIENCE)[0]  # the kernels are done with each other
                return 10.0

        monkeypatch.setattr(probing, "time", Late())
        there = Endpoint("127.0.0.1", listener.getsockname()[1])
        assert answers([there], 0.2) == {there: True}


def test_a_living_generation_is_found_by_its_listeners():
    store = MemoryStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = Endpoint("127.0.0.1", listener.getsockname()[1])
        joined(store, ask(0, 1, endpoint=here))
        second = Rendezvous(store, ask(0, 1, who=9), deadline=time.monotonic() + 0.5)
        with pytest.raises(RankTakenError, match="Generation 1 of world 'w' is active and host host0"):
            second.agree()
    third = Rendezvous(store, ask(0, 1, who=9), deadline=time.monotonic() + PATIENCE)
    assert third.agree().generation == 2


def test_a_generation_that_died_is_no_excuse_for_a_late_member():
    store = MemoryStore()
    joined(store, ask(0), ask(1))
    with pytest.raises(JoinTimeoutError, match="missing: rank 0"):
        way(store, ask(1, who=9), timeout=0.3, probe=nobody).agree()


@pytest.mark.parametrize(("known_at", "agreed_by"), [(1.0, 3.0), (99.0, 31.0)])
def test_a_survivor_waits_for_no_member_that_is_found_lost_meanwhile(known_at, agreed_by):
    """That one's address answers, as that of a process that is stopped: only the watchdog can tell."""
    one, *others = (seat(who, 1, 3) for who in range(3))
    store, clock = MemoryStore(), Clock()
    began, before = clock(), active(Ledger(), one, *others)
    WorldRecord(store, "w", time.sleep).apply(lambda _: Move(before))

    def sleep(seconds):
        clock.now += seconds

    mine = way(
        store, again(before, one, 2), 100.0, clock=clock, sleep=sleep, last_call=30.0,
        more_lost=lambda: frozenset({1} if clock() - began >= known_at else ()),
    )  # fmt: skip
    assert mine._agree().size == 1
    assert min(known_at, 30.0) <= clock() - began < agreed_by
    assert mine._record.ledger.before.lost == ((1, 2) if known_at < 30.0 else (2,))


class CutOff:
    """A member that reaches the store alone: two others have made the next generation without it.

    `answers_at`: seconds after which one of them answers once.
    """

    def __init__(self, timeout, last_call, *, answers_at=(), newcomer=False):
        one, two, third = (seat(who, 1, 3) for who in range(3))
        self.clock, self.began, self.answers_at = Clock(), 0.0, list(answers_at)
        store, first = MemoryStore(), active(Ledger(), one, two, third)
        second = active(first, again(first, one, 2), again(first, two, 2))
        WorldRecord(store, "w", time.sleep).apply(lambda _: Move(second))
        self.began = self.clock()
        asked = seat(9, 1, 3) if newcomer else again(first, third, 0, 1)
        self.way = way(
            store, asked, timeout, clock=self.clock, sleep=self.sleep, last_call=last_call, probe=self.probe
        )

    def sleep(self, seconds):
        self.clock.now += seconds

    def probe(self, endpoints, within):
        self.clock.now += within
        answers = self.answers_at and self.took >= self.answers_at[0] and self.answers_at.pop(0)
        return dict.fromkeys(endpoints, True if answers else None)

    @property
    def took(self):
        return self.clock() - self.began


@pytest.mark.parametrize(
    ("newcomer", "least", "most"), [(False, 20.0, 21.5), (True, 40.0, 42.0)], ids=["before", "newcomer"]
)
def test_a_generation_of_which_no_member_answers_is_taken_for_dead(newcomer, least, most):
    """After the last call, which begins with the first look; a newcomer makes another one."""
    member = CutOff(100.0, 20.0, newcomer=newcomer)
    roster = member.way._agree()
    assert (roster.generation, roster.size) == (3, 1)
    assert least <= member.took < most


def test_one_answer_begins_the_last_call_anew():
    member = CutOff(100.0, 20.0, answers_at=[12.0])
    assert member.way._agree().generation == 3
    assert 32.0 <= member.took < 34.0


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_join_that_ends_before_the_last_call_takes_no_generation_for_dead(newcomer):
    for timeout in (4.0, 29.0):
        with pytest.raises(JoinTimeoutError):
            CutOff(timeout, 30.0, newcomer=newcomer).way._agree()
