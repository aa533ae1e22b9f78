"""A join whose member has received a state in part, from one that was lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import pytest

from multiworld._join import join
from multiworld.errors import (
    JoinAbandonedError,
    JoinTimeoutError,
    StateTransferError,
    StoreUnreachableError,
    WorldClosedError,
    WorldError,
)
from multiworld.events import State


@pytest.fixture
def late(monkeypatch):
    """Runs a join that meets no other member until its deadline; `torn`: what its handle says of the state."""

    def run(*, torn, world=None, cancelled=False):
        made = world or SimpleNamespace(
            _closes=0, _torn=torn, _state_claimed=None, close=lambda _seconds: closes.append(made)
        )
        steps, closes, given_up = iter([made]), [], [False]

        def once(*_):
            if (found := next(steps, None)) is None:
                raise JoinTimeoutError("w", "too few")
            return found

        def brought(_handle, _kept):
            given_up.append(cancelled)
            raise join.BrokenWorldException("w", "the other one is lost")

        monkeypatch.setattr(join, "_join_once", once)
        monkeypatch.setattr(join, "bring_up_to_date", brought)
        plan = SimpleNamespace(name="w", who="seat 'b'", timeout=3.0, on_loss="break")
        deadline = join.time.monotonic() + 0.1
        with pytest.raises(WorldError) as caught:
            join._join_assigned(
                plan, world, lambda: given_up[-1], deadline, join._Tries(contextlib.ExitStack())
            )
        return caught.value, closes

    return run


def test_a_join_that_ends_with_a_state_in_part_says_so(late):
    error, closes = late(torn=True)
    assert type(error) is StateTransferError
    assert "seat 'b' of world 'w' has a part of the state" in str(error)
    assert "3 s" in str(error)
    assert closes, "the handle of the join is closed"


def test_a_join_that_has_changed_nothing_says_why_it_ended(late):
    error, closes = late(torn=False)
    assert type(error) is not StateTransferError
    assert closes


def test_a_join_that_is_given_up_ends_with_what_it_met(late):
    error, closes = late(torn=True, cancelled=True)
    assert type(error) is join.BrokenWorldException
    assert closes


def test_a_member_that_joins_again_keeps_its_handle_and_knows_of_its_state(late):
    world = SimpleNamespace(_closes=0, _torn=True, _state_claimed=None)
    error, closes = late(torn=True, world=world)
    assert type(error) is JoinTimeoutError
    assert not closes


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_a_world_that_is_closed_while_its_state_is_brought_is_no_longer_joined(monkeypatch, closed, again):
    """Closed by another thread; a state's own methods may use other worlds, that are closed."""
    handle = SimpleNamespace(_closes=0, close=lambda _seconds: closes.append(handle))
    closes = []

    def brought(handle, _kept):
        handle._closes += closed
        raise WorldClosedError("w", "world 'w' (generation 2) was closed")

    monkeypatch.setattr(join, "_join_once", lambda *_: handle)
    monkeypatch.setattr(join, "bring_up_to_date", brought)
    plan = SimpleNamespace(name="w", who="seat 'b'")
    with pytest.raises(JoinAbandonedError if closed else WorldClosedError, match="was closed"):
        join._join_assigned(
            plan, handle if again else None, lambda: False, 0.0, join._Tries(contextlib.ExitStack())
        )
    assert closes == ([] if again else [handle])


def test_a_join_that_is_cancelled_just_before_its_state_is_brought_brings_none(monkeypatch):
    closes, given_up = [], [False]
    handle = SimpleNamespace(_closes=0, _torn=False, close=lambda _seconds: closes.append("w"))

    def once(*_):
        given_up.append(True)
        return handle

    monkeypatch.setattr(join, "_join_once", once)
    monkeypatch.setattr(join, "bring_up_to_date", lambda *_: pytest.fail("brought"))
    plan = SimpleNamespace(name="w", who="seat 'b'", store="tcp://a:1")
    with pytest.raises(JoinAbandonedError, match="gave up"):
        join._join_assigned(
            plan,
            None,
            lambda: given_up[-1],
            join.time.monotonic() + 60.0,
            join._Tries(contextlib.ExitStack()),
        )
    assert closes == ["w"]


def test_a_rejoin_that_is_cancelled_just_before_its_state_is_brought_brings_it(monkeypatch):
    """Its handle is active, and not closed here: the other members wait for it, and its task closes it."""
    brought, given_up = [], [False]
    handle = SimpleNamespace(_closes=0, _torn=False)

    def once(*_):
        given_up.append(True)
        return handle

    monkeypatch.setattr(join, "_join_once", once)
    monkeypatch.setattr(join, "bring_up_to_date", lambda *_: brought.append("w"))
    plan = SimpleNamespace(name="w", who="seat 'b'", on_loss="break")
    deadline = join.time.monotonic() + 60.0
    tries = join._Tries(contextlib.ExitStack())
    assert join._join_assigned(plan, handle, lambda: given_up[-1], deadline, tries) is handle
    assert brought == ["w"]


@pytest.mark.parametrize("mine", [True, False])
def test_a_join_that_is_cancelled_while_its_state_is_brought_closes_its_world_at_once(monkeypatch, mine):
    plan, begun, closed, given_up = SimpleNamespace(name="w"), threading.Event(), [], threading.Event()
    threads = threading.enumerate()

    def close(_seconds):
        closed.append("w")
        given_up.set()

    def run(_cancelled):
        begun.set()
        assert given_up.wait(30)
        raise JoinAbandonedError("w", "world 'w' was closed")

    handle = SimpleNamespace(_plan=plan if mine else SimpleNamespace(), state=State.ACTIVE, close=close)
    monkeypatch.setattr(join, "registry", SimpleNamespace(worlds=lambda: {"w": handle}))

    async def cancel():
        task = asyncio.ensure_future(join._threaded(plan, run))
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    if mine:
        assert given_up.wait(30)
    given_up.set()
    for thread in set(threading.enumerate()) - set(threads):
        thread.join(30)
    assert closed == ["w"] * mine, "another one of that name stays"


def test_a_planned_join_that_has_come_about_is_withdrawn_as_soon_as_it_is_given_up(monkeypatch):
    """Its loop may be held up, and cancel it later: what joins that name again waits for its end."""
    given_up, said = [False], []

    def joined(_plan, _world, cancelled, withdrawn):
        said.append(withdrawn())
        given_up[0] = True
        said.extend([cancelled(), withdrawn()])
        return SimpleNamespace(name="w")

    monkeypatch.setattr(join, "_join", joined)
    asyncio.run(join.join_planned_async(SimpleNamespace(name="w"), lambda: given_up[0]))
    assert said == [False, True, True]


@pytest.fixture
def breaks(monkeypatch):
    """Runs a join whose time is over: each of its worlds breaks while a state is brought, then one does not.

    `culprits`: the ranks that broke each, of the processes "0", "1" and so on; `begun`: the transfers had begun.
    """

    def run(*culprits, begun=True, whole=True):
        members = [SimpleNamespace(process=str(rank)) for rank in range(3)]
        made = SimpleNamespace(
            _closes=0, _torn=False, _state_claimed=3 if whole else None, close=lambda _seconds: None,
            _gen=SimpleNamespace(roster=SimpleNamespace(members=members), breakage=None),
        )  # fmt: skip
        tries, deadlines = iter(culprits), []

        def once(_plan, _world, _cancelled, deadline, _tries):
            deadlines.append(deadline)
            return made

        def brought(_handle, kept):
            ranks = next(tries, None)
            if ranks is not None:
                kept.begun, made._gen.breakage = begun, SimpleNamespace(ranks=ranks)
                raise join.BrokenWorldException("w", "the sender is lost")

        monkeypatch.setattr(join, "_join_once", once)
        monkeypatch.setattr(join, "bring_up_to_date", brought)
        plan = SimpleNamespace(name="w", who="seat 'b'", timeout=60.0, on_loss="break")
        deadlines.append(join.time.monotonic())
        shared = join._Tries(contextlib.ExitStack())
        found = join._join_assigned(plan, None, lambda: False, deadlines[0], shared)
        return found is made, [late - deadlines[0] for late in deadlines[1:]]

    return run


def test_members_lost_in_a_transfer_that_outlasts_the_timeout_leave_the_others_a_whole_one(breaks):
    joined, left = breaks((0,), (1, 2))
    assert joined
    assert left[0] == 0.0
    assert 60.0 <= left[1] <= left[2]


def test_the_timeout_begins_anew_once_for_each_process(breaks):
    """Two that cannot get a state to each other would try for ever."""
    joined, left = breaks((0, 1), (1,), (0,))
    assert joined
    assert left[1] == left[2] == left[3]


@pytest.mark.parametrize(("ranks", "begun"), [((0,), False), ((), True)])
@pytest.mark.parametrize(("whole", "says"), [(True, "while they joined"), (False, "did not get its state")])
def test_a_join_whose_time_is_over_says_whether_it_lacks_the_state(breaks, ranks, begun, whole, says):
    with pytest.raises(JoinTimeoutError, match=f"{says}.*the sender is lost"):
        breaks(ranks, begun=begun, whole=whole)


@pytest.mark.parametrize(
    ("agreed", "store", "tries"), [(True, "tcp://a:1", 2), (False, "tcp://a:1", 1), (True, object(), 1)]
)
def test_a_store_that_goes_away_after_an_agreement_is_looked_for_again(monkeypatch, agreed, store, tries):
    made = []

    def once(_plan, _world, _cancelled, _deadline, shared):
        made.append(shared.agreed)
        shared.agreed = agreed and len(made) == 1
        raise StoreUnreachableError("w", "The store of world 'w' failed")

    monkeypatch.setattr(join, "_join_once", once)
    plan = SimpleNamespace(name="w", who="seat 'b'", timeout=60.0, on_loss="break", store=store)
    deadline = join.time.monotonic() + 60.0
    with pytest.raises(StoreUnreachableError):
        join._join_assigned(plan, None, lambda: False, deadline, join._Tries(contextlib.ExitStack()))
    assert made == [False] * tries
