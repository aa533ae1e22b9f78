"""When a member of a world that works looks again who waits to come in."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from multiworld._generation.resources import STORE_LOOK
from multiworld._join import preparing, succession_store
from multiworld._join.preparing import AGAIN_AT_MOST, LOOK_EVERY, Preparing
from multiworld._join.succession_store import SuccessionStore
from multiworld.errors import StoreUnreachableError
from multiworld.events import State


class Store:
    """Answers or does not, in turn."""

    def __init__(self, answers):
        self.answers = list(answers)

    def follow(self, gen): ...

    def reopen(self): ...

    def of(self, gen):
        return self

    def due(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if not answer:
            raise StoreUnreachableError("w", "The store gave no answer")
        return False


def looks(answers):
    """Pauses after looks at a store that answers so."""
    gen = SimpleNamespace(world="w", number=1, rank=0, state=State.ACTIVE)
    world = SimpleNamespace(name="w", _gen=gen, _plan=SimpleNamespace(present=None))
    preparing = Preparing(world, print, SimpleNamespace(look=lambda: None))
    preparing._store = Store(answers)
    return [preparing._look(gen, 0) for _ in answers]


def test_a_store_that_is_served_elsewhere_in_a_moment_is_looked_at_soon():
    """A newcomer waits meanwhile."""
    assert looks([False, True, False]) == [LOOK_EVERY] * 3


def test_a_store_that_stays_silent_is_looked_at_less_and_less():
    assert looks([False] * 4) == [0.2, 1.0, AGAIN_AT_MOST, AGAIN_AT_MOST]


def test_an_error_of_the_host_does_not_end_the_looks():
    error = OSError(24, "Too many open files")
    assert looks([error, RuntimeError("can't start new thread"), False, True]) == [0.2, 1.0, 5.0, LOOK_EVERY]


class Due(Store):
    """Newcomers wait."""

    def __init__(self): ...

    def due(self):
        return True

    def close(self): ...


@pytest.fixture
def due(monkeypatch):
    """A world whose next generation is due, and what is asked of its counter and of the watcher."""
    gen = SimpleNamespace(world="w", number=1, rank=0, state=State.ACTIVE)
    world = SimpleNamespace(name="w", _gen=gen, _plan=SimpleNamespace(present=None))
    counter = SimpleNamespace(look=lambda: None, withdraw=lambda: None)
    it = SimpleNamespace(gen=gen, counter=counter, preparing=Preparing(world, print, counter))
    it.preparing._store = Due()
    monkeypatch.setattr(preparing, "watcher", SimpleNamespace(add=lambda *_: None))
    return it


def test_stop_waits_for_a_preparation_that_the_host_begins_late(due, monkeypatch):
    asked, begin, over = threading.Event(), threading.Event(), threading.Event()
    start, lock = threading.Thread.start, due.preparing._lock

    def late(thread):
        if thread.name == "m8d-advance-w":
            asked.set()
            assert begin.wait(60)
        start(thread)

    class Asked:
        """The lock, for which the thread that stops it asks, or not."""

        def __enter__(self):
            if threading.current_thread() is threading.main_thread():
                begin.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    monkeypatch.setattr(threading.Thread, "start", late)
    due.preparing._lock, due.preparing._prepare = Asked(), lambda *_: over.set()
    looks = threading.Thread(target=due.preparing._look, args=(due.gen, 0))
    looks.start()
    try:
        assert asked.wait(60)
        due.preparing.stop(time.monotonic() + 60)
        assert over.is_set()
    finally:
        begin.set()
        looks.join(60)


def test_a_host_without_a_thread_for_a_preparation_is_asked_again(due, monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert due.preparing._look(due.gen, 0) == AGAIN_AT_MOST
    due.preparing.stop(time.monotonic() + 60)
    assert due.preparing._thread is None


def test_a_preparation_withdraws_its_limit_before_the_next_one_may_begin(due):
    """A wish to leave has it begin at once."""
    asked = []
    due.preparing._thread = threading.current_thread()
    due.counter.withdraw = lambda: asked.append(due.preparing._look(due.gen, 0))
    due.preparing._prepare(due.gen, SimpleNamespace(due=lambda: False))
    assert asked == [LOOK_EVERY], "it sees that one is under way"
    assert due.preparing._thread is None


class Opened:
    """A store that was opened, and perhaps closed."""

    def __init__(self):
        self.closed, self.used = False, True

    def close(self):
        self.closed = True

    def spare(self):
        return not self.used


@pytest.fixture
def standing_in(monkeypatch):
    """A world's store that went away, and what was opened in its place."""
    opening = pytest.importorskip("multiworld._net.stores.opening")
    plan = SimpleNamespace(name="w", meets_at="tcp://a:1", served=False, present=None)
    it = SimpleNamespace(
        world=SimpleNamespace(state=State.ACTIVE, _plan=plan, _gen=object()),
        opened=[],
        meanwhile=lambda: None,
    )
    it.steps = []
    monkeypatch.setattr(
        succession_store, "releaser", SimpleNamespace(add=lambda _, step: it.steps.append(step))
    )

    def open_in_time(*_, **__):
        it.meanwhile()
        it.opened.append(Opened())
        return it.opened[-1]

    monkeypatch.setattr(opening, "open_in_time", open_in_time)
    it.store = SuccessionStore(it.world)
    return it


def test_what_is_opened_for_a_world_that_is_closed_meanwhile_is_closed(standing_in):
    def close():
        standing_in.world.state = State.CLOSED
        standing_in.store.close()

    standing_in.meanwhile = close
    standing_in.store.reopen()
    assert [each.closed for each in standing_in.opened] == [True]


def test_what_stood_in_for_a_store_is_closed_where_the_world_is_joined_at_another(standing_in):
    standing_in.store.reopen()
    standing_in.store.begin()
    assert [each.closed for each in standing_in.opened] == [False]
    standing_in.world._plan.meets_at = "tcp://b:1"
    standing_in.store.begin()
    assert [each.closed for each in standing_in.opened] == [True]


def test_what_stood_in_for_a_store_is_closed_after_a_breakage_once_others_do_not_use_it(standing_in):
    world = standing_in.world
    standing_in.store.broke(world._gen)
    assert standing_in.steps == [], "there is none"
    standing_in.store.reopen()
    (opened,) = standing_in.opened
    world.state = State.BROKEN
    standing_in.store.broke(world._gen)
    (step,) = standing_in.steps
    assert step() == STORE_LOOK
    opened.used, world.state = False, State.JOINING
    assert (step(), opened.closed) == (STORE_LOOK, False)
    world.state = State.BROKEN
    assert (step(), opened.closed) == (None, True)
    assert step() is None


def test_what_stood_in_for_a_store_stays_where_the_world_was_joined_there_again(standing_in):
    world = standing_in.world
    standing_in.store.reopen()
    standing_in.store.broke(world._gen)
    world._gen = object()
    standing_in.opened[0].used = False
    assert [step() for step in standing_in.steps] == [None]
    assert not standing_in.opened[0].closed


def test_a_host_without_descriptors_does_not_end_looking_for_a_store(standing_in):
    def fails():
        raise OSError(24, "Too many open files")

    standing_in.meanwhile = fails
    standing_in.store.reopen()
    assert standing_in.opened == []


def test_what_is_opened_for_a_world_that_breaks_meanwhile_is_closed_as_well(standing_in):
    standing_in.meanwhile = lambda: setattr(standing_in.world, "state", State.BROKEN)
    standing_in.store.reopen()
    standing_in.opened[0].used = False
    assert [step() for step in standing_in.steps] == [None]
    assert standing_in.opened[0].closed
