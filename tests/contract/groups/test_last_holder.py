"""Backends are let go of after all else that holds them; here stores stand for them, which C++ holds the same way."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref

import pytest
import torch.distributed as dist
from kits.contract.worldkit import PATIENCE

from multiworld._c10d import last_holder as module
from multiworld._c10d.last_holder import LastHolder


@pytest.fixture
def holder():
    """One whose thread has ended when the test has: other tests in this process look at the threads."""
    made = LastHolder()
    yield made
    made._stopped = False
    assert soon(lambda: not made._running)


def held():
    """A store in a list, what shows that its Python object lives, and what holds it in C++."""
    store = dist.HashStore()
    return [store], weakref.ref(store), dist.PrefixStore("", store)


def soon(what):
    deadline = time.monotonic() + PATIENCE
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def stays(alive):
    time.sleep(3 * module.FIRST_PAUSE)
    return alive() is not None


def test_what_nothing_else_holds_is_free_at_once(holder):
    stores = [dist.HashStore()]
    alive = weakref.ref(stores[0])
    holder.let_go(stores.pop())
    assert alive() is None
    assert not holder._running


def test_what_is_held_in_c_is_kept_until_it_is_not(holder):
    (stores, alive, other), (more, still, another) = held(), held()
    holder.let_go(stores.pop())
    holder.let_go(more.pop())
    assert stays(alive)
    del other
    holder.nudge()
    assert soon(lambda: alive() is None)
    assert stays(still)
    del another
    assert soon(lambda: still() is None)


def test_it_is_freed_in_a_thread_of_its_own_which_ends(holder):
    stores, alive, other = held()
    seen = []
    watch = weakref.finalize(stores[0], lambda: seen.append(threading.current_thread().name))
    holder.let_go(stores.pop())
    del other
    assert soon(lambda: alive() is None)
    assert not watch.alive
    assert seen == ["m8d-release"]
    assert soon(lambda: not holder._running)
    stores, alive, other = held()  # it begins anew
    holder.let_go(stores.pop())
    del other
    assert soon(lambda: alive() is None)


def test_many_threads_lose_none(holder):
    """Each closing thread hands over what is held, and asks for a look, while the keeper looks and ends."""
    alive, lost = [], []

    def close():
        for _ in range(60):
            stores, each, other = held()
            holder.let_go(stores.pop())
            holder.nudge()
            if each() is None:
                lost.append(other)
            alive.append(each)
            del other
            time.sleep(0.003)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
    assert soon(lambda: all(each() is None for each in alive))
    assert soon(lambda: not holder._running)


def test_without_a_thread_it_waits_for_the_next_one(holder, monkeypatch):
    stores, alive, other = held()

    class NoThread:
        def __init__(self, *_, **__):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(module.threading, "Thread", NoThread)
        holder.let_go(stores.pop())
        del other
        assert stays(alive)
    stores, another, more = held()
    holder.let_go(stores.pop())
    assert soon(lambda: alive() is None)
    assert another() is not None
    del more


def test_where_holders_cannot_be_counted_it_is_kept_as_long_as_users_have_the_group(holder, monkeypatch):
    """And for a moment after it: of one that has ended, a thread may be in its last operation still."""

    class Group:
        pass

    monkeypatch.setattr(module, "_counted", lambda: False)
    (stores, alive, _), (more, still, _), group = held(), held(), Group()
    gone, freed = weakref.ref(Group()), []
    weakref.finalize(alive(), lambda: freed.append((time.monotonic(), threading.current_thread())))
    began = time.monotonic()
    holder.let_go(stores.pop(), gone)
    holder.let_go(more.pop(), weakref.ref(group))
    assert soon(lambda: freed)
    ((at, thread),) = freed
    assert at >= began + module.FIRST_PAUSE / 10
    assert thread is not threading.current_thread()
    assert stays(still)
    del group
    assert soon(lambda: still() is None)


def test_a_moment_without_a_descriptor_is_no_answer_for_good(holder, monkeypatch):
    module._counted.cache_clear()
    stores, alive, other = held()

    class NoMemory:
        def __init__(self):
            raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(module.cxx, "Memory", NoMemory)
        assert module.countable()
        holder.let_go(stores.pop())
        del other
        assert stays(alive)
    assert soon(lambda: alive() is None)
    assert module.countable()


def test_nothing_is_freed_while_the_program_ends(holder):
    stores, alive, other = held()
    holder.let_go(stores.pop())
    holder.stop(time.monotonic() + PATIENCE)
    del other
    assert stays(alive)


def test_a_forked_child_frees_nothing_of_its_parents(holder):
    stores, alive, other = held()
    holder.let_go(stores.pop())
    child = os.fork()
    if child == 0:
        del other
        mine, free, kept = held()
        holder.let_go(mine.pop())
        del kept
        os._exit(0 if soon(lambda: free() is None) and alive() is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del other
    assert soon(lambda: alive() is None)


def test_python_objects_are_nothing_that_c_holds(holder):
    things = [threading.Event()]
    alive = weakref.ref(things[0])
    holder.let_go(things.pop())
    assert alive() is None
