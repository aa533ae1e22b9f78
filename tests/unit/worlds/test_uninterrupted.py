"""Operations of several steps go on where a signal's handler ends the wait for them."""

from __future__ import annotations

import _thread
import contextlib
import functools
import itertools
import threading

import pytest
from kits.meetkit import until
from kits.signalkit import At, Interrupted

pytest.importorskip("torch", reason="steps are run by threads that wait for torch's works, too")

from multiworld import turns as turns_module
from multiworld import uninterrupted
from multiworld._c10d import waiter_pool
from multiworld.turns import COLLECTIVE, Turns


@pytest.fixture(autouse=True)
def no_threads():
    yield
    waiter_pool.pool.dismiss()


def run(turns, steps, *, cut=pytest.fail, **more):
    return uninterrupted.run(turns, COLLECTIVE, lambda: True, steps, cut=cut, **more)


def test_an_interrupted_operation_goes_on_and_keeps_its_turn():
    turns, may_end, ended = Turns(), threading.Event(), []

    def steps():
        _thread.interrupt_main()
        may_end.wait(60)
        turns.wait(COLLECTIVE, pytest.fail)  # for its own turn it does not wait
        ended.append(threading.current_thread())

    with pytest.raises(KeyboardInterrupt):
        run(turns, steps)
    assert turns.hold(COLLECTIVE)
    assert not ended
    may_end.set()
    turns.wait(COLLECTIVE, lambda: True)
    assert [thread is threading.main_thread() for thread in ended] == [False]
    assert not turns.taken


def test_what_the_steps_return_and_raise_comes_to_the_caller():
    turns = Turns()
    assert run(turns, lambda: 5, first=lambda: True) == 5
    with pytest.raises(LookupError, match="gone"):
        run(turns, lambda: {}["gone"])
    assert not turns.taken


def test_where_the_first_step_is_ended_no_other_one_follows():
    turns = Turns()

    def first():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(turns, pytest.fail, first=first)
    assert not turns.taken


@pytest.fixture
def no_other_thread(monkeypatch):
    def refuse(_job):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(waiter_pool.pool, "run", refuse)


@pytest.mark.usefixtures("no_other_thread")
def test_without_another_thread_the_caller_runs_the_steps():
    turns = Turns()
    assert run(turns, threading.current_thread) is threading.main_thread()
    with pytest.raises(ValueError, match="invalid literal"):
        run(turns, functools.partial(int, "x"))
    assert not turns.taken


@pytest.mark.usefixtures("no_other_thread")
@pytest.mark.parametrize("has_first", [False, True])
def test_without_another_thread_it_is_told_that_an_interrupt_left_steps_half_done(has_first):
    for at in itertools.count(1):
        turns, done, cuts = Turns(), [], []
        first = (lambda done=done: not done.append("first")) if has_first else None
        signalled = At(at, {uninterrupted.__file__, turns_module.__file__})
        with contextlib.suppress(Interrupted), signalled:
            run(turns, lambda done=done: done.append("rest"), first=first, cut=cuts.append)
        assert not turns.taken
        assert cuts or done != ["first"]
        if signalled.left > 0:
            break
    assert at > 100, "it was interrupted at many places"
    assert (done[-1], cuts) == ("rest", [])


@pytest.mark.usefixtures("no_other_thread")
@pytest.mark.parametrize("raised", [KeyboardInterrupt(), TimeoutError("by a handler")], ids=repr)
def test_without_another_thread_an_interrupt_in_the_steps_is_told(raised):
    turns, cuts = Turns(), []

    def steps():
        raise raised

    with pytest.raises(type(raised)):
        run(turns, steps, cut=cuts.append)
    assert cuts == [raised]
    assert not turns.taken


def test_a_thread_that_no_signal_reaches_runs_them_itself_in_its_turn():
    turns, seen = Turns(), []
    before = turns.take(COLLECTIVE)
    thread = threading.Thread(
        target=lambda: seen.append(
            run(turns, threading.current_thread, first=lambda: not seen.append("first"))
        )
    )
    thread.start()
    until(lambda: len(turns.taken) == 2)
    assert not seen
    before.over()
    thread.join(60)
    assert seen == ["first", thread]
    assert not turns.taken


@pytest.mark.parametrize("has_first", [False, True])
def test_a_thread_that_no_signal_reaches_keeps_its_turn_until_the_steps_are_over(has_first):
    turns, began, may_end = Turns(), threading.Event(), threading.Event()

    def step():
        turns.wait(COLLECTIVE, pytest.fail)  # for its own turn it does not wait
        began.set()
        return may_end.wait(60)

    more = {"first": step} if has_first else {}
    thread = threading.Thread(target=lambda: run(turns, step, **more))
    thread.start()
    assert began.wait(60)
    held = turns.hold(COLLECTIVE)
    may_end.set()
    thread.join(60)
    assert held
    assert not turns.taken


def test_an_operation_after_an_interrupted_one_waits_although_no_thread_has_that_yet(monkeypatch):
    turns, goes_on, threads = Turns(), threading.Event(), []

    def give(job):
        def late():
            until(lambda: not job.__self__._begins.locked())
            _thread.interrupt_main()
            goes_on.wait(60)
            job()

        threads.append(threading.Thread(target=late))
        threads[0].start()

    monkeypatch.setattr(waiter_pool.pool, "run", give)
    with pytest.raises(KeyboardInterrupt):
        run(turns, lambda: None)
    looks = itertools.count()

    def look():
        if next(looks):  # it has looked once what it waits for
            goes_on.set()
        return True

    try:
        turns.wait(COLLECTIVE, look)
    finally:
        goes_on.set()
        threads[0].join(60)
    assert not turns.taken


@pytest.mark.parametrize("has_first", [False, True])
def test_an_interrupt_anywhere_leaves_no_turn_and_nothing_half_done(has_first):
    for at in itertools.count(1):
        turns, done = Turns(), []
        first = (lambda done=done: not done.append("first")) if has_first else None
        signalled = At(at, {uninterrupted.__file__, turns_module.__file__})
        with contextlib.suppress(Interrupted), signalled:
            run(turns, lambda done=done: done.append("rest"), first=first)
        assert {turn.waits_in for turn in tuple(turns.taken)} <= {None}, "this thread does not wait any more"
        until(lambda turns=turns: not turns.taken)
        if "first" in done:
            until(lambda done=done: done == ["first", "rest"])
        if signalled.left > 0:
            break
    assert at > 100, "it was interrupted at many places"
    assert done[-1] == "rest"
