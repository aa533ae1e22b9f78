"""Backends are let go of after all else that holds them; here stores stand for them, which C++ holds the same way."""

from __future__ import annotations

import os
import threading
import time
import weakref

import pytest
import torch.distributed as dist
from worldkit import PATIENCE

from multiworld._c10d import last_holder as module
from multiworld._c10d.last_holder import LastHolder


@pytest.fixture
def holder():
    return LastHolder()


def held():
    """A store, what shows that its Python object lives, and what holds it in C++."""
    store = dist.HashStore()
    return [store], weakref.ref(store), dist.PrefixStore("", store)


def free_soon(alive):
    deadline = time.monotonic() + PATIENCE
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive() is None


def test_what_nothing_else_holds_is_free_at_once(holder):
    stores = [dist.HashStore()]
    alive = weakref.ref(stores[0])
    holder.let_go(stores)
    assert alive() is None
    assert stores == []
    assert len(holder) == 0


def test_what_is_held_in_c_is_kept_until_it_is_not(holder):
    (stores, alive, other), (more, still, another) = held(), held()
    holder.let_go(stores)
    holder.let_go(more)
    time.sleep(3 * module.FIRST_PAUSE)
    assert len(holder) == 2
    assert alive() is not None
    del other
    assert free_soon(alive)
    assert still() is not None
    holder.look()
    del another
    assert free_soon(still)


def test_it_is_freed_in_a_thread_of_its_own_which_ends(holder):
    stores, alive, other = held()
    seen = []
    watch = weakref.finalize(stores[0], lambda: seen.append(threading.current_thread().name))
    holder.let_go(stores)
    del other
    assert free_soon(alive)
    assert not watch.alive
    assert seen == ["m8d-release"]
    deadline = time.monotonic() + PATIENCE
    while holder._running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not holder._running


def test_without_a_thread_it_waits_for_the_next_one(holder, monkeypatch):
    stores, alive, other = held()

    class NoThread:
        def __init__(self, *_, **__):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(module.threading, "Thread", NoThread)
        holder.let_go(stores)
        del other
        holder.look()
        assert alive() is not None
    holder.let_go([])
    assert free_soon(alive)


@pytest.mark.parametrize("error", [OSError, None])
def test_where_holders_cannot_be_counted_it_is_freed_a_little_later(holder, monkeypatch, error):
    stores, alive, other = held()
    if error is None:
        monkeypatch.setattr(module, "countable", lambda: False)
    else:

        class NoMemory:
            def __init__(self):
                raise error

        monkeypatch.setattr(module.cxx, "Memory", NoMemory)
    began = time.monotonic()
    holder.let_go(stores)
    assert alive() is not None
    if error is not None:  # for a while: it is asked again
        time.sleep(3 * module.FIRST_PAUSE)
        assert alive() is not None
        monkeypatch.undo()
        del other
    assert free_soon(alive)
    assert time.monotonic() > began + module.FIRST_PAUSE / 2


def test_a_forked_child_frees_nothing_of_its_parents(holder):
    stores, alive, other = held()
    holder.let_go(stores)
    child = os.fork()
    if child == 0:
        del other
        holder.let_go([dist.HashStore()])
        holder.look()
        time.sleep(3 * module.FIRST_PAUSE)
        os._exit(0 if alive() is not None and len(holder) == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del other
    assert free_soon(alive)


def test_python_objects_are_nothing_that_c_holds(holder):
    things = [threading.Event(), None]
    alive = weakref.ref(things[0])
    holder.let_go(things)
    assert alive() is None
