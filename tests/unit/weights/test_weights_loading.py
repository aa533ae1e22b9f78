"""An engine that loads a version while the next one is told."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from multiworld._core.weights import Head
from multiworld.errors import StateError
from multiworld.weights import publisher, subscriber

WITHIN = 30.0
"""Seconds, of what comes at once."""


@pytest.fixture
def engine(monkeypatch):
    """Has version 1 whole, without a trainer; `loads` is called when that is loaded; `sent`: to the trainer."""
    monkeypatch.setattr(subscriber.Subscriber, "_run", lambda _self: None)
    made = subscriber.Subscriber("w", {}, "file:///nowhere", timeout=4 * 0.05)
    made.sent, made.loads = [], lambda: None
    monkeypatch.setattr(subscriber, "load", lambda *_: made.loads())
    monkeypatch.setattr(subscriber.wire, "send", lambda _world, what: made.sent.append(what))
    with made._changed:
        made._session, made.told, made._staged = "s", 1, head(1)
    yield made
    assert made.close()


def head(version):
    return Head("s", version, 1024, (), ())


def test_the_trainer_hears_that_an_engine_loads_longer_than_the_timeout(engine):
    """It would take the engine for lost, at each version anew."""
    begun = threading.Event()

    def loads():
        begun.set()
        latest = time.monotonic() + WITHIN
        while {"busy": True} not in engine.sent[2:]:
            assert not told.wait(0.01), "the next version has come into what is loaded"
            assert time.monotonic() < latest, "the trainer hears nothing"
        during.append((engine.ready, engine.version, engine.told))

    def next_one():
        assert begun.wait(WITHIN)
        engine._take(object(), head(2))
        told.set()

    engine.loads, told, during = loads, threading.Event(), []
    thread = threading.Thread(target=next_one, daemon=True)
    thread.start()
    assert engine.update(WITHIN) == 1
    assert not engine.ready, "it was told of the next version long before"
    thread.join(WITHIN)
    assert during == [(False, None, 2)]
    assert engine.sent[:3] == [{"busy": True}] * 3
    assert engine.sent[-2:] == [{"need": []}, {"got": 2}]
    assert (engine.version, engine.told, engine.ready) == (1, 2, False)
    engine.loads = lambda: None
    assert engine.update(WITHIN) == 2


@pytest.mark.parametrize(("error", "version"), [(StateError("no fit"), 0), (MemoryError("none left"), None)])
def test_a_version_that_was_not_loaded_is_loaded_by_the_next_call(engine, error, version):
    engine.version, engine._loaded = 0, ("s", 0)

    def fails():
        raise error

    engine.loads = fails
    for _ in range(2):
        with pytest.raises(type(error)):
            engine.update(WITHIN)
        assert (engine.version, engine.ready) == (version, False)
    engine.loads = lambda: None
    assert engine.update(WITHIN) == 1
    assert engine.ready


@pytest.mark.parametrize("at", ["begins", "loads", "ends"])
def test_a_version_whose_load_was_interrupted_is_loaded_by_the_next_call(engine, monkeypatch, at):
    """The engine would neither be ready nor take another version, for good."""
    notify, whole = engine._changed.notify_all, subscriber.whole

    def interrupted(*_):
        engine.loads, engine._changed.notify_all = lambda: None, notify
        monkeypatch.setattr(subscriber, "whole", whole)
        raise KeyboardInterrupt

    if at == "begins":
        engine._changed.notify_all = interrupted
    elif at == "loads":
        engine.loads = interrupted
    else:
        monkeypatch.setattr(subscriber, "whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.update(WITHIN)
    assert engine.update(WITHIN) == 1
    assert engine.ready
    engine._take(object(), head(2))
    assert engine.update(WITHIN) == 2


def test_nothing_comes_into_what_is_loaded_after_a_close(engine):
    engine._loading = True
    engine._closed.set()
    with pytest.raises(ValueError, match="is closed"):
        engine._take(object(), head(2))
    assert engine.told == 1


def test_a_close_frees_what_came(engine):
    room = subscriber.wire.room(16)
    engine._rooms, engine._sums, freed = [room], [""], weakref.ref(room)
    del room
    assert engine.close()
    assert freed() is None
    with pytest.raises(ValueError, match="is closed"):
        engine.update(WITHIN)


@pytest.mark.parametrize("seconds", [float("inf"), 1e10])
def test_a_time_without_an_end_is_waited_for(engine, monkeypatch, seconds):
    engine._staged = None

    def comes():
        latest = time.monotonic() + WITHIN
        while time.monotonic() < latest:
            with engine._changed:
                if engine._waiting:
                    engine._staged = head(1)
                    engine._changed.notify_all()
                    return

    thread = threading.Thread(target=comes)
    thread.start()
    try:
        assert engine.update(seconds) == 1
    finally:
        thread.join()
    monkeypatch.setattr(subscriber.Subscriber, "_run", lambda self: self._closed.wait(WITHIN))
    assert subscriber.Subscriber("w", {}, "file:///nowhere").close(seconds)


def test_a_trainer_waits_for_an_engine_that_is_busy(monkeypatch):
    answers = iter([{"busy": True}, {"busy": True}, {"need": []}, {"got": 3}])
    monkeypatch.setattr(publisher.wire, "send", lambda *_: None)
    monkeypatch.setattr(publisher.wire, "receive", lambda _world: next(answers))
    version = SimpleNamespace(head=lambda _within: head(3), number=3)
    shelf = SimpleNamespace(waiting=lambda _version: contextlib.nullcontext())
    mine = SimpleNamespace(_plan=SimpleNamespace(timeout=1.0), _shelf=shelf)
    assert publisher.Publisher._send(mine, object(), version)


def in_a_child(function):
    """What a function returns in a forked child."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process that has threads
        child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], WITHIN)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return json.loads(pipe.read() or "null")


def refused(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return "of which this one was forked" in str(error)
    return False


def test_a_forked_child_has_a_subscriber_of_its_parents_only(engine):
    """It hears of no version, and a thread of the parent's may have had the lock."""
    assert engine.update() == 1
    assert engine.ready
    engine._world = object()
    with engine._changed:
        told = in_a_child(lambda: [engine.ready, engine.connected, refused(engine.update), engine.close()])
    engine._world = None
    assert told == [False, False, True, True]
    assert engine.ready


def test_a_forked_child_has_a_publisher_of_its_parents_only(tmp_path):
    mine = publisher.Publisher("w", {}, f"file://{tmp_path}/store")
    try:
        with mine._shelf.changed:
            told = in_a_child(lambda: [refused(mine.publish, 0), refused(mine.wait), mine.close()])
    finally:
        assert mine.close()
    assert told == [True, True, True]
    assert mine.version is None
