"""`join_all` in one process: which states it takes, and what calls at the same time do to each other."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kits.meetkit import PATIENCE, together, until

from multiworld._join.arguments import LAST_CALL, is_same_state
from multiworld.errors import InvalidJoinError, JoinAbandonedError, MismatchError, UnknownWorldError
from multiworld.events import State
from multiworld.joinall import calls, joins, one_world
from multiworld.joinall.launcher_client import AssignedWorld

NAMES = ("x", "y", "z")
AFTER = {"z": ("x",)}


class Stateful:
    def state_dict(self):
        return {}

    def load_state_dict(self, _state):
        pass


class Launcher:
    """Assigns worlds of a range to this process."""

    retirement = SimpleNamespace(begun=False)

    def ask(self, _patience):
        return {
            name: AssignedWorld(
                name,
                None,
                "1:2",
                "a:0",
                LAST_CALL,
                "gloo",
                "tcp://h:1",
                False,
                60.0,
                None,
                None,
                AFTER.get(name, ()),
            )
            for name in NAMES
        }

    def following(self, plan):
        return plan

    def store_of(self, plan):
        return plan.store

    def moved(self, _store, _plan):
        return False


class Handle:
    """Of a world of this process, as `join_all` sees it."""

    def __init__(self, plan):
        self._plan, self.state, self.name, self._closes = plan, State.ACTIVE, plan.name, 0

    def wait_active(self, _timeout):
        self.state = State.ACTIVE
        return self

    def close(self, _seconds=None):
        self.state = State.CLOSED
        self._closes += 1

    def on_break(self, _fn):
        pass


@pytest.fixture
def here(monkeypatch):
    """A process without worlds: `worlds` has what it joins."""
    found = SimpleNamespace(worlds={}, joins=joins.Joins(Launcher()))

    def first(plan, _cancelled):
        found.worlds[plan.name] = handle = Handle(plan)
        return handle

    def again(handle, _timeout, store, *, planned, state, cancelled):
        assert planned
        assert not cancelled()
        handle._plan = replace(handle._plan, store=store, state=state or handle._plan.state)
        return handle.wait_active(0)

    def call(*names, state=None, rejoin=True):
        request = joins.JoinAllRequest(rejoin, None, state, None, threading.Event())
        made = found.joins.join(names, request)
        found.joins.keep(request)
        return made

    def open_worlds():
        return {name: each for name, each in found.worlds.items() if each.state is not State.CLOSED}

    found.call = call
    for module in (joins, one_world):
        monkeypatch.setattr(module, "worlds", open_worlds)
    monkeypatch.setattr(one_world, "_first", first)
    monkeypatch.setattr(one_world.joining, "rejoin", again)
    return found


def test_states_are_the_same_by_their_objects():
    one, other = Stateful(), Stateful()
    assert is_same_state(one, one)
    assert is_same_state({"m": one, "o": other}, {"o": other, "m": one})
    assert not is_same_state(one, other)
    assert not is_same_state(None, one)
    assert not is_same_state({"m": one}, one)
    assert not is_same_state({"m": one}, {"m": other})
    assert not is_same_state({"m": one}, {"m": one, "o": other})


def test_a_state_of_a_world_that_is_not_joined_is_refused(here):
    with pytest.raises(InvalidJoinError, match=r"a state for world 'y', which this call does not join"):
        here.call("x", state={"y": Stateful()})
    with pytest.raises(UnknownWorldError, match="this worker is in no world 'w'"):
        here.call("x", state={"w": Stateful()})
    assert not here.worlds


def test_an_active_world_keeps_its_state(here):
    one, other = Stateful(), Stateful()
    world = here.call("x", state={"x": {"model": one}})["x"]
    assert here.call("x")["x"] is world
    assert here.call("x", state={"x": {"model": one}})["x"] is world
    with pytest.raises(InvalidJoinError, match="which this process has joined with another state"):
        here.call(state={"x": {"model": other}})
    assert list(here.worlds) == ["x"]


@pytest.mark.parametrize("state", [State.ACTIVE, State.BROKEN])
def test_a_world_that_was_joined_without_a_state_gets_none(here, state):
    here.call("x", rejoin=False)["x"].state = state
    with pytest.raises(InvalidJoinError, match="which this process has joined with no state"):
        here.call("x", state={"x": Stateful()})


def test_a_world_that_broke_goes_on_with_the_state_that_is_given(here):
    one, other = Stateful(), Stateful()
    world = here.call("x", state={"x": one})["x"]
    world.state = State.BROKEN
    assert here.call("x")["x"]._plan.state is one
    world.state = State.BROKEN
    assert here.call("x", state={"x": other})["x"] is world
    assert world._plan.state is other


@pytest.mark.parametrize("abandoned", [True, False])
def test_a_broken_world_that_is_closed_while_it_is_joined_again_stays_closed(here, monkeypatch, abandoned):
    """Also where the join comes about all the same, as the close came in its last moment."""
    world = here.call("x", rejoin=False)["x"]
    world.state = State.BROKEN
    tries = []

    def again(handle, *_, cancelled, **__):
        tries.append(cancelled())
        handle.close()
        if abandoned and len(tries) == 1:
            raise JoinAbandonedError("x", "closed by another thread")
        return handle.wait_active(0)

    monkeypatch.setattr(one_world.joining, "rejoin", again)
    with pytest.raises(JoinAbandonedError, match="closed"):
        here.call("x")
    assert (tries, world.state) == ([False], State.CLOSED)
    assert here.call("x")["x"] is not world, "it is joined anew where it is asked for once more"


def test_a_state_that_another_call_was_faster_with_is_refused(here, monkeypatch):
    one, other = Stateful(), Stateful()

    def late(plan, _cancelled):
        here.worlds["x"] = Handle(replace(plan, state=other))
        return here.worlds["x"]

    monkeypatch.setattr(one_world, "_first", late)
    with pytest.raises(InvalidJoinError, match="with another state"):
        here.call("x", state={"x": one})


@pytest.mark.parametrize("without", [("x",), ("x", "y", "z")])
def test_a_join_that_gets_no_thread_fails_and_may_be_tried_again(here, monkeypatch, without):
    real = threading.Thread.start

    def start(thread):
        if thread.name in {f"m8d-join-{name}" for name in without}:
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", start)
        with pytest.raises(
            JoinAbandonedError, match=r"could not be joined: can't start new thread|comes after one"
        ):
            here.call()
    assert not here.joins._pending
    assert all(each.state is State.CLOSED for each in here.worlds.values())
    assert set(here.call()) == set(NAMES)


def test_an_awaited_call_that_gets_no_thread_says_so(monkeypatch):
    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(calls, "_mine", {"": joins.Joins(Launcher())})
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(JoinAbandonedError, match=r"could not be joined: can't start new thread"):
        asyncio.run(calls.join_all_async("x"))


def test_first_calls_of_several_threads_share_their_joins(monkeypatch):
    both = threading.Barrier(2, timeout=PATIENCE)

    def made():
        both.wait()  # the other thread has found none either
        return joins.Joins(Launcher())

    monkeypatch.setattr(calls, "_mine", {})
    monkeypatch.setattr(calls, "_parents", [])
    monkeypatch.setattr(calls, "Joins", made)
    one, other = together(calls._here, calls._here)
    assert one is other is calls._here()
    calls._forked()
    assert calls._parents == [one]
    assert not calls._mine, "a forked child begins anew"


@pytest.fixture
def slow(here, monkeypatch):
    """As `here`; the worlds are joined when the test lets them, "x" never. `start` calls in a thread."""
    here.go = {name: threading.Event() for name in NAMES}
    here.results = {}

    def first(plan, cancelled):
        until(lambda: here.go[plan.name].is_set() or cancelled())
        if cancelled():
            raise JoinAbandonedError(plan.name, "given up")
        if plan.name == "x":
            raise MismatchError("x", "it cannot be")
        here.worlds[plan.name] = handle = Handle(plan)
        return handle

    def start(who, *names):
        def run():
            try:
                here.results[who] = here.call(*names)
            except (JoinAbandonedError, MismatchError) as error:
                here.results[who] = error

        thread = threading.Thread(target=run)
        thread.start()
        threads.append(thread)

    def ended(who):
        until(lambda: who in here.results)
        return here.results[who]

    def share(name, calls):
        until(lambda: (found := here.joins._pending.get(name)) and len(found.calls) == calls)

    threads = []
    here.start, here.ended, here.share = start, ended, share
    monkeypatch.setattr(one_world, "_first", first)
    yield here
    for event in here.go.values():
        event.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_world_that_another_call_was_given_stays(slow):
    slow.start("first", "y", "x")
    slow.go["y"].set()
    until(lambda: "y" in slow.joins._made)
    world = slow.call("y")["y"]
    slow.go["x"].set()
    assert isinstance(slow.ended("first"), MismatchError)
    assert world.state is State.ACTIVE


def test_a_join_that_another_call_waits_for_goes_on(slow):
    slow.start("first", "y", "x")
    slow.share("y", 1)
    slow.start("second", "y")
    slow.share("y", 2)
    slow.go["x"].set()
    assert isinstance(slow.ended("first"), MismatchError)
    assert "second" not in slow.results
    slow.go["y"].set()
    assert slow.ended("second")["y"].state is State.ACTIVE


def test_the_last_call_that_fails_closes_what_was_joined(slow):
    slow.start("first", "y", "x")
    slow.go["y"].set()
    until(lambda: "y" in slow.joins._made)
    slow.start("second", "y", "x")
    slow.share("x", 2)
    slow.go["x"].set()
    assert isinstance(slow.ended("first"), MismatchError)
    assert isinstance(slow.ended("second"), MismatchError)
    assert slow.worlds["y"].state is State.CLOSED
    assert not slow.joins._pending
    assert not slow.joins._made


def test_a_call_that_comes_while_a_world_is_undone_joins_it_anew(slow, monkeypatch):
    closes, go = threading.Event(), threading.Event()

    def close(handle, _seconds):
        closes.set()
        assert go.wait(PATIENCE)
        handle.state = State.CLOSED

    monkeypatch.setattr(Handle, "close", close)
    slow.start("first", "y", "x")
    slow.go["y"].set()
    until(lambda: "y" in slow.joins._made)
    slow.go["x"].set()
    assert closes.wait(PATIENCE)
    undone = slow.worlds["y"]
    slow.start("second", "y")
    slow.share("y", 1)
    go.set()
    world = slow.ended("second")["y"]
    assert isinstance(slow.ended("first"), MismatchError)
    assert (world is undone, world.state) == (False, State.ACTIVE)


def test_a_join_that_only_another_call_gave_up_is_tried_again(slow):
    """The other call's world comes after one that cannot be, which this call does not ask for."""
    slow.start("first", "x", "z")
    slow.share("z", 1)
    slow.start("second", "z")
    slow.share("z", 2)
    slow.go["z"].set()
    slow.go["x"].set()
    assert slow.ended("second")["z"].state is State.ACTIVE
    assert isinstance(slow.ended("first"), MismatchError | JoinAbandonedError)
