"""What unblocks gloo's calls: the works that are posted, and threads of any name."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest

pytest.importorskip("torch")

from multiworld._c10d.gloo import unblocking
from multiworld._c10d.gloo.unblocking import Posted


class Work:
    """Something that can be referred to weakly."""


def test_works_that_are_posted_meanwhile_are_kept():
    posted = Posted()
    kept = [Work() for _ in range(3 * unblocking._MANY)]
    for each in kept:
        posted.add(each)
        posted.add(Work())
    assert len(posted._works) <= 2 * len(kept)
    before = posted._works  # as another thread has it that is about to add one
    first, late = posted.take(), Work()
    before[id(late)] = unblocking.weakref.ref(late)
    assert set(map(id, first)) == set(map(id, kept))
    assert posted.take() == [late]


def test_works_of_many_threads_are_kept():
    posted, kept, start = Posted(), [[] for _ in range(4)], threading.Barrier(4)

    def post(mine):
        start.wait()
        for _ in range(2000):
            mine.append(Work())
            posted.add(mine[-1])

    threads = [threading.Thread(target=post, args=(mine,)) for mine in kept]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert set(map(id, posted.take())) == {id(each) for mine in kept for each in mine}


def test_works_that_are_posted_while_the_garbage_is_collected_are_kept():
    """A collection may begin wherever something is made; its finalizers let other threads go on."""
    posted, kept, late = Posted(), [Work() for _ in range(3 * unblocking._MANY)], []

    def another(phase, _):
        if phase == "start" and len(late) < 2000:
            late.append(Work())
            posted._works[id(late[-1])] = unblocking.weakref.ref(late[-1])

    before = gc.get_threshold()
    gc.callbacks.append(another)
    gc.set_threshold(1, 1_000_000, 1_000_000)
    try:
        for each in kept:
            posted.add(each)
    finally:
        gc.callbacks.remove(another)
        gc.set_threshold(*before)
    assert set(map(id, posted.take())) == set(map(id, kept + late))


def test_a_thread_whose_name_is_cut_in_the_middle_of_a_character():
    found = []

    def named():
        ctypes.CDLL(None).prctl(
            15, "\u043e\u0431\u0443\u0447\u0435\u043d\u0438\u0435.py".encode(), 0, 0, 0
        )  # PR_SET_NAME
        found.append(unblocking._start_of(threading.get_native_id()))

    thread = threading.Thread(target=named)
    thread.start()
    thread.join()
    assert found
    assert found[0].isdigit()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_system_that_does_not_tell_where_threads_sleep_is_told_at_once(tmp_path, monkeypatch, hidden):
    warned = []
    monkeypatch.setattr(unblocking, "_warn", lambda: warned.append(True))
    monkeypatch.setattr(unblocking.cxx, "usable", lambda: True)
    monkeypatch.setattr(unblocking.cxx, "address_of", lambda _: 4096)
    monkeypatch.setattr(unblocking, "_is_group", lambda _: True)
    if hidden:
        monkeypatch.setattr(unblocking, "_TASKS", tmp_path)
    assert unblocking.workers_of(object(), frozenset(), 0) == ((), 0 if hidden else 4096)
    assert warned == [True] * hidden
