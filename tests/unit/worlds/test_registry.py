"""Names to worlds: who may take one, and who holds it afterwards."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import types

import pytest

from multiworld import background_threads
from multiworld.errors import InvalidJoinError, StaleGenerationError
from multiworld.events import State
from multiworld.registry import Registry, Reservation


class FakeWorld:
    def __init__(self, state=State.ACTIVE, generation=1):
        self.name, self.state, self.generation, self.rank = "w", state, generation, 0
        self._gen = self
        self.closed_with = None

    def _close(self, seconds, failure=""):
        assert failure == ""
        self.closed_with = seconds
        self.state = State.CLOSED


def holding(world):
    registry = Registry()
    registry.reserve("w")
    registry.settle("w", world, world.generation, 0)
    return registry


def test_a_name_is_joined_once_at_a_time():
    registry = Registry()
    assert registry.reserve("w") is None
    with pytest.raises(InvalidJoinError, match="being joined"):
        registry.reserve("w")
    registry.reserve("other")
    registry.settle("w", None)
    assert registry.reserve("w") is None
    assert registry.worlds() == {}


def test_a_join_that_was_given_up_has_its_name_until_it_and_its_world_are_over():
    registry, world, given_up = Registry(), FakeWorld(), []
    join = Reservation(registry, "w", 0, lambda: bool(given_up), lambda: "by its awaiter" in given_up)
    other = Reservation(registry, "w", 0)
    assert not registry.being_undone("w")
    registry.reserve("w", None, join)
    assert not registry.being_undone("w")
    given_up.append("out of time")
    assert registry.being_undone("w")
    join.world = world  # it came about nevertheless
    join.end()
    assert not registry.being_undone("w"), "nothing closes it"
    given_up.append("by its awaiter")
    assert registry.being_undone("w")
    world.state = State.CLOSED
    assert not registry.being_undone("w")
    registry.remove("w", world)
    registry.reserve("w", None, other)
    assert not registry.being_undone("w")
    other.world = FakeWorld()
    other.end()
    assert not registry.being_undone("w")


def test_an_active_world_keeps_its_name():
    world = FakeWorld()
    registry = holding(world)
    for held in (None, world):
        with pytest.raises(InvalidJoinError, match="generation 1, rank 0"):
            registry.reserve("w", held)
    assert registry.worlds() == {"w": world}
    assert registry.last("w") == (1, 0)
    assert registry.last("x") == (0, -1)


def test_a_broken_world_gives_way_to_a_new_handle_and_to_itself():
    world = FakeWorld(State.BROKEN)
    registry = holding(world)
    assert registry.reserve("w") is world
    registry.settle("w", None)
    assert registry.worlds() == {"w": world}, "the join failed: it is still there, and broken"
    assert registry.reserve("w", world) is None


@pytest.mark.parametrize("state", [State.BROKEN, State.ACTIVE])
def test_an_older_handle_does_not_take_the_name(state):
    old, new = FakeWorld(State.CLOSED), FakeWorld(state, 2)
    registry = holding(new)
    with pytest.raises(StaleGenerationError, match=r"since generation 1.*generation 2"):
        registry.reserve("w", old)
    registry.remove("w", old)
    assert registry.worlds() == {"w": new}
    registry.remove("w", new)
    assert registry.worlds() == {"w": new}, "it is not closed: its close ended after it was joined again"
    new.state = State.CLOSED
    registry.remove("w", new)
    assert registry.reserve("w", old) is None


def test_a_world_that_was_closed_while_it_was_joined_is_not_kept():
    registry = holding(FakeWorld(State.CLOSED, 4))
    assert registry.worlds() == {}
    assert registry.last("w") == (4, 0)


def test_a_closed_world_is_not_listed():
    world = FakeWorld()
    registry = holding(world)
    world.state = State.CLOSED
    assert registry.worlds() == {}


def test_a_destructor_in_a_look_at_the_worlds_looks_at_them_and_removes_one():
    """As the collector may run it, in any thread."""
    seen = []

    class Collected(FakeWorld):
        @property
        def state(self):
            if not seen:
                seen.append(None)
                seen.append(registry.worlds())
                self.now = State.CLOSED
                registry.remove("w", self)
            return self.now

        @state.setter
        def state(self, value):
            self.now = value

    settled, world, registry = Collected(), FakeWorld(), Registry()
    registry._worlds.update(w=settled, v=world)
    thread = threading.Thread(target=lambda: seen.append(registry.worlds()), daemon=True)
    thread.start()
    thread.join(10)
    assert seen == [None, {"w": settled, "v": world}, {"v": world}]


def test_a_forked_child_has_been_in_no_generation(monkeypatch):
    registry = holding(FakeWorld(generation=3))
    registry.note("w", 4)
    assert (registry.last("w"), registry.noted("w")) == ((3, 0), 4)
    monkeypatch.setattr(FakeWorld, "_forked", lambda _: None, raising=False)
    child = os.getpid() + 1
    monkeypatch.setattr("os.getpid", lambda: child)
    registry._forked()
    assert (registry.last("w"), registry.noted("w")) == ((0, -1), 0)
    assert registry.worlds() == {}


@pytest.mark.parametrize("name", ["m8d-destroy", "m8d-rendezvous", "m8d-join-w"])
def test_the_end_waits_for_threads_that_are_in_torch(name):
    """Python would end them in C++, and the process with them; how long they may take is bounded."""
    registry, bell, done = holding(FakeWorld()), threading.Event(), []

    def work():
        bell.wait(30)
        done.append(True)

    threading.Thread(target=work, name=name, daemon=True).start()
    threading.Timer(0.3, bell.set).start()
    began = time.monotonic()
    registry.close_all()
    assert done
    assert time.monotonic() - began < 1.0 + background_threads.GRACE


def test_the_end_leaves_a_thread_behind_that_hangs(monkeypatch):
    monkeypatch.setattr(background_threads, "GRACE", 0.05)
    registry, bell = holding(FakeWorld()), threading.Event()
    thread = threading.Thread(target=bell.wait, name="m8d-abort", daemon=True)
    thread.start()
    registry.close_all(timeout=0.05)
    assert thread.is_alive()
    bell.set()
    thread.join(30)


def test_members_that_gave_up_a_group_end_one_after_the_other(monkeypatch):
    # The end of one of them brings back the other's thread, which must not find an interpreter at its end.
    monkeypatch.setattr(background_threads, "GRACE", 0.05)
    monkeypatch.setattr(background_threads, "_APART", 0.2)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    for rank, turn in ((1, 1), (7, 7)):
        registry, bell = holding(FakeWorld()), threading.Event()
        thread = threading.Thread(target=bell.wait, name=f"m8d-nccl-connect-{rank}", daemon=True)
        thread.start()
        began = time.monotonic()
        registry.close_all(timeout=0.05)
        assert time.monotonic() - began >= 0.05 + 0.2 * turn
        bell.set()
        thread.join(30)
    assert background_threads._turn(["m8d-nccl-connect-8", "m8d-read"]) == 0


@pytest.mark.parametrize(("load", "longer"), [(1.0, 1.0), (6.0, 3.0), (100.0, 8.0)])
def test_on_a_busy_machine_they_end_further_apart(monkeypatch, load, longer):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert background_threads._turn(["m8d-nccl-connect-1"]) == background_threads._APART * longer


def test_a_system_that_does_not_tell_its_load_is_taken_for_a_quiet_one(monkeypatch):
    def refused():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", refused)
    assert background_threads._turn(["m8d-nccl-connect-1"]) == background_threads._APART


def test_the_end_waits_for_a_join_that_is_slow_to_give_up():
    """It may be loading modules: ended in the middle of that, it would hold locks that the end needs."""
    registry, join = Registry(), object()
    registry.reserve("w", join=join)
    threading.Timer(0.3, registry.settle, ("w", None), {"join": join}).start()
    registry.close_all(timeout=0.05)
    assert registry.joining() == ()


def test_no_world_is_joined_once_the_interpreter_ends(monkeypatch):
    """Nothing would end the join's threads, which come back from torch in the middle of that end."""

    def refused(_):
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr(threading, "_register_atexit", refused)
    registry = Registry()
    registry.hook()
    assert registry.ending
    with pytest.raises(InvalidJoinError, match="while the program ends"):
        registry.reserve("w")


def test_names_that_are_not_used_any_more_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr("multiworld.registry.NAMES", 3)
    registry, live = Registry(), FakeWorld()
    registry.reserve("live")
    registry.settle("live", live, 7, 1)
    for number in range(10):
        registry.note(f"w{number}", number)
        registry.moved(f"w{number}", number, 0)
    registry.moved("w8", 9, 0)
    registry.moved("new", 1, 0)
    assert (registry.last("live"), registry.last("w8"), registry.last("w9")) == ((7, 1), (9, 0), (0, -1))
    assert [registry.noted(f"w{number}") for number in (0, 6, 7, 9)] == [0, 0, 7, 9]
    assert (len(registry._last), len(registry._noted)) == (3, 3)


def test_a_thread_in_which_a_patched_build_connects_a_given_up_group_is_waited_for(monkeypatch):
    """It is no thread of Python's; its name is known to the kernel."""
    libc, bell = ctypes.CDLL(None), threading.Event()

    def connect():
        libc.prctl(15, b"pt_nccl_init", 0, 0, 0)  # PR_SET_NAME
        named.set()
        bell.wait(60)

    named = threading.Event()
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    assert named.wait(60)
    backend = types.SimpleNamespace(abandoned=set())
    monkeypatch.setitem(sys.modules, "multiworld._c10d.nccl.backend", backend)
    assert background_threads._left() == []
    backend.abandoned.add(3)
    assert background_threads._left() == ["m8d-nccl-connect-3"]
    bell.set()
    thread.join(60)
    deadline = time.monotonic() + 60  # the kernel's thread ends a moment after Python's
    while background_threads._left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert background_threads._left() == []


def test_what_uses_worlds_is_closed_before_them_at_the_end_and_held_weakly():
    order, world = [], FakeWorld()
    registry = holding(world)

    class User:
        def close(self, timeout=5.0):
            assert timeout <= 1.0
            order.append(world.state)
            return True

    user, gone = User(), User()
    registry.close_at_end(user)
    registry.close_at_end(gone)
    del gone
    registry.close_all(ending=False)
    assert order == []
    registry.close_all()
    assert order == [State.CLOSED]
    order.clear()
    later = FakeWorld()
    again = holding(later)
    again.close_at_end(user)
    world.state = State.ACTIVE
    again.close_all()
    assert order == [State.ACTIVE]


def test_closing_all_closes_all_and_ending_ends_joining():
    world = FakeWorld()
    registry = holding(world)
    assert registry.close_all(timeout=3.0, ending=False)
    assert world.closed_with == 3.0
    registry.reserve("x")
    assert registry.close_all()
    with pytest.raises(InvalidJoinError, match="program ends"):
        registry.reserve("y")


def test_without_a_thread_all_worlds_are_closed_here_and_the_end_goes_on(monkeypatch):
    worlds, registry, started = [FakeWorld() for _ in range(4)], Registry(), []
    for number, world in enumerate(worlds):
        world.name = f"w{number}"
        registry.reserve(world.name)
        registry.settle(world.name, world, 1, 0)

    def fails(*_):
        raise ValueError("a step of its close fails")

    def first_only(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        thread_start(thread)

    thread_start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", first_only)
    monkeypatch.setattr(worlds[1], "_close", fails)
    ended = []
    monkeypatch.setattr(background_threads, "end", ended.append)
    assert registry.close_all(timeout=5.0)
    assert started == ["m8d-close-w0"]
    assert [world.state for world in worlds] == [State.CLOSED, State.ACTIVE, State.CLOSED, State.CLOSED]
    assert all(0 < world.closed_with <= 5.0 for world in worlds[2:])
    assert len(ended) == 1
