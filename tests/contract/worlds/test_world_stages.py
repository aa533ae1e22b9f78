"""The stages of real worlds, as the log of the state machine tells them; in one process, worlds of one member."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch.distributed as dist

import multiworld as mw
from multiworld._core.state_machine import Action, Stage
from multiworld._generation.generation import Generation
from multiworld._join import steps
from multiworld._net.stores.record import WorldRecord
from multiworld.events import Breakage, Cause, State
from multiworld.logs import source
from multiworld.logs.limit import RateLimit
from multiworld.metrics.recorder import Recorder
from multiworld.registry import registry
from multiworld.watchdog import Watchdog


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(source._LIMITED, "_limit", RateLimit())  # other tests have worlds of this name
    caplog.set_level(logging.DEBUG, "multiworld.state")
    return lambda: [record.getMessage().split(": ", 1)[1].split(" (")[0] for record in caplog.records]


def joined(store=None, **more):
    return mw.join("stages", 0, 1, store=store or dist.HashStore(), timeout=20, **more)


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_every_action_is_carried_out():
    assert set(Generation._DO) == set(Action)


def test_a_world_that_is_joined_and_closed(log):
    world = joined()
    assert world.close()
    assert world.close(), "again"
    assert log() == ["connecting -> opening", "opening -> active", "active -> closed"]


def test_a_world_that_breaks_is_retired_and_rejoined(log):
    world = joined(store := dist.HashStore())
    world._gen.verdict(Breakage(Cause.FAILED, (), "a test says so", time.monotonic()))
    assert world.state is State.BROKEN
    first = world._gen
    assert wait_for(lambda: first.machine.stage is Stage.RETIRED), "nothing asked for it"
    assert world.state is State.BROKEN
    world.rejoin(store=store)
    assert (world.state, first.state) == (State.ACTIVE, State.BROKEN)
    assert world.close()
    begun = ["connecting -> opening", "opening -> active"]
    assert log() == [*begun, "active -> broken", "broken -> retired", *begun, "active -> closed"]
    with pytest.raises(mw.BrokenWorldException, match="a test says so"):
        raise first.error()


class Held(logging.Handler):
    """A handler of the log that holds the thread in which a world breaks, while the block runs."""

    def __init__(self, world):
        super().__init__()
        self.world, self.begun, self.over = world, threading.Event(), threading.Event()
        breakage = Breakage(Cause.CRASHED, (), "a test says so", time.monotonic())
        self.breaking = threading.Thread(target=world._gen.verdict, args=(breakage,))

    def handle(self, record):  # without the handler's lock: the lines of other threads go on
        if "-> broken" in record.getMessage():
            self.begun.set()
            self.over.wait(60.0)

    def __enter__(self):
        logging.getLogger("multiworld.state").addHandler(self)
        self.breaking.start()
        assert self.begun.wait(60.0)
        return self

    def __exit__(self, *exc):
        self.over.set()
        self.breaking.join(60.0)
        logging.getLogger("multiworld.state").removeHandler(self)


def test_what_follows_an_error_raises_too_while_the_breakage_is_still_being_logged(log):
    world = joined()
    first = world._gen
    with Held(world):
        assert isinstance(
            first.explain(ConnectionError("reset")), mw.BrokenWorldException
        )  # as of an operation
        with pytest.raises(mw.BrokenWorldException, match="a test says so"):
            world.elastic_group.barrier()
    world.close()


@pytest.fixture
def told():
    seen = []
    forget = mw.subscribe(lambda event: seen.append(type(event).__name__))
    yield seen
    forget()


def test_a_breakage_is_told_before_the_close_while_it_is_still_being_logged(log, told):
    recorder = Recorder()
    recorder.begin()
    world = joined()
    try:
        del told[:]
        with Held(world):
            assert world.close()
            assert told == ["WorldBroken", "WorldClosed"]
        assert len(told) == 2
        ((_, since),) = recorder.records(time.monotonic())[0].values()
        assert since is None, "a closed world is not broken"
    finally:
        recorder.end()


def test_a_breakage_is_told_before_a_rejoin_while_it_is_still_being_logged(log, told):
    world = joined()
    del told[:]
    with Held(world):
        world.rejoin()
        assert told == ["WorldBroken", "WorldJoining", "WorldActive"]
    assert len(told) == 3
    world.close()


def test_a_close_while_a_subscriber_hears_of_the_breakage_is_told_after_it(log):
    """It waits for no subscriber: one may wait for the thread that closes the world."""
    begun, over = threading.Event(), threading.Event()

    def hold(event):
        if isinstance(event, mw.WorldBroken):
            begun.set()
            over.wait(60.0)

    told, forget = [], [mw.subscribe(hold)]
    forget.append(mw.subscribe(lambda event: told.append(type(event).__name__)))
    world = joined()
    breakage = Breakage(Cause.CRASHED, (), "a test says so", time.monotonic())
    breaking = threading.Thread(target=world._gen.verdict, args=(breakage,))
    try:
        del told[:]
        breaking.start()
        assert begun.wait(60.0)
        assert world.close()
        assert told == []
        assert mw.worlds() == {}
    finally:
        over.set()
        breaking.join(60.0)
        for each in forget:
            each()
    assert told == ["WorldBroken", "WorldClosed"]


def broken(store):
    world = joined(store)
    world._gen.verdict(Breakage(Cause.FAILED, (), "a test says so", time.monotonic()))
    return world


def generation_in(store):
    """The generation that the store's record has as the present one; None where it is over for all."""
    record = WorldRecord(store, "stages", time.sleep)
    record.read()
    return record.ledger.current


def test_a_world_that_is_joined_again_elsewhere_is_over_where_it_was():
    here, there = dist.HashStore(), dist.HashStore()
    world = broken(here)
    assert generation_in(here).generation == world.generation
    world.rejoin(store=there)
    assert generation_in(here) is None
    assert generation_in(there).generation == world.generation
    world.close()


def test_a_join_that_comes_to_nothing_before_its_claim_says_that_the_last_generation_is_over(monkeypatch):
    store = dist.HashStore()
    world = broken(store)
    seen = []

    def fails(*_args):
        seen.append(generation_in(store).generation)  # the claim is to say it
        raise OSError("no claim is made")

    with monkeypatch.context() as patched:
        patched.setattr(steps, "build", fails)
        with pytest.raises(OSError, match="no claim"):
            world.rejoin()
    assert seen == [world.generation]
    assert generation_in(store) is None
    world.rejoin()
    assert generation_in(store).generation == world.generation == seen[0] + 1
    world.close()


def test_a_breakage_is_told_after_the_world_is_active(log):
    seen = []

    def note(event):
        seen.append((type(event).__name__, event.generation))
        if isinstance(event, mw.WorldActive):
            mw.worlds()["stages"]._gen.verdict(Breakage(Cause.FAILED, (), "at once", time.monotonic()))
            assert mw.worlds()["stages"].state is State.ACTIVE
            assert mw.worlds()["stages"].breakage is None

    forget = mw.subscribe(note)
    try:
        world = joined()
    finally:
        forget()
    assert world.state is State.BROKEN
    assert [name for name, _ in seen] == ["WorldJoining", "WorldActive", "WorldBroken"]
    assert log() == ["connecting -> opening", "opening -> doomed", "doomed -> broken"]
    world.close()


def test_a_world_breaks_though_ctrl_c_came_at_the_end_of_its_rejoin(monkeypatch):
    world, told = broken(dist.HashStore()), []
    keep = steps.keep_devices

    def keeping():
        end = keep()

        def over():
            end()
            raise KeyboardInterrupt

        return over

    monkeypatch.setattr(steps, "keep_devices", keeping)
    with pytest.raises(KeyboardInterrupt):
        world.rejoin()
    assert (world.state, world._gen.machine.stage) == (State.ACTIVE, Stage.ACTIVE)
    world._gen.verdict(Breakage(Cause.FAILED, (), "a test says so", time.monotonic()))
    world.on_break(told.append)
    assert wait_for(lambda: told)
    assert world.state is State.BROKEN
    world.close()


def test_a_join_that_is_interrupted_as_soon_as_it_is_attached_leaves_nothing(monkeypatch):
    store, attach = dist.HashStore(), Watchdog.attach

    def interrupted(*args, **more):
        attach(*args, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Watchdog, "attach", interrupted)
        with pytest.raises(KeyboardInterrupt):
            joined(store)
    seen = registry.watchdog().snapshot()
    assert (seen.worlds, seen.listeners) == ((), 0)
    assert joined(store).close()


@pytest.mark.parametrize("again", [False, True])
def test_a_join_that_is_interrupted_as_its_generation_begins_does_not_go_on_listening(monkeypatch, again):
    store = dist.HashStore()

    def of_a_range():
        return mw.join("stages", None, "1:2", store=store, timeout=20, last_call=0)

    world = of_a_range() if again else None
    if again:
        world.close()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mw.World, "_begins", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.rejoin() if again else of_a_range()
    assert registry.watchdog().snapshot().listeners == 0
    assert mw.worlds() == {}
    made = of_a_range()
    assert registry.watchdog().snapshot().listeners == 1
    assert made.close()


def test_a_join_that_fails(log, monkeypatch):
    def build(*_):
        raise mw.JoinAbandonedError("stages", "a test gives up")

    monkeypatch.setattr(steps, "build", build)
    with pytest.raises(mw.JoinAbandonedError):
        joined()
    assert log() == ["connecting -> abandoned"]


def test_a_rejoin_that_another_thread_closes_at_its_last_step(log, monkeypatch):
    world = joined(store := dist.HashStore())
    world.close()
    plain, closed = steps.build, []

    def build(*args):
        made = plain(*args)
        closed.append(world.close())
        return made

    monkeypatch.setattr(steps, "build", build)
    with pytest.raises(mw.JoinAbandonedError, match="closed by another thread"):
        world.rejoin(store=store)
    assert closed == [True]
    assert world.state is State.CLOSED
    assert log()[-1] == "connecting -> abandoned"
    monkeypatch.undo()
    world.rejoin(store=store)  # nothing of that attempt is left
    assert world.state is State.ACTIVE
    assert world.close()
