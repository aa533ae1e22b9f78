"""Whether a call of the package came in the middle of another one, and what is done in a thread then."""

from __future__ import annotations

import contextvars
import threading
import time

import pytest
from kits.meetkit import PATIENCE, until

from multiworld.logs.aside import never_wait
from multiworld.reentry import in_the_middle, in_time


def of_module(name, source, **names):
    """The function `call` of a module of that name."""
    made = {"__name__": name, **names}
    exec(source, made)  # noqa: S102  (the frame's module is what counts)
    return made["call"]


def own(inner, name="multiworld.somewhere"):
    """A function of the package that calls `inner`."""
    return of_module(name, "def call(): return inner()", inner=inner)


def of_a_program(inner):
    return of_module("program", "def call(): return inner()", inner=inner)


def test_a_call_of_a_program_is_in_the_middle_of_none():
    assert not in_the_middle()
    assert not own(in_the_middle)()
    assert not own(own(in_the_middle))(), "called by the package itself"
    assert not of_a_program(own(in_the_middle))()
    assert not own(in_the_middle, "multiworlds")()


def test_a_handler_is_in_the_middle_of_the_call_that_it_interrupted():
    handler = of_a_program(own(own(in_the_middle)))
    assert own(handler)()
    assert own(of_a_program(handler))()
    assert own(handler, "multiworld")()
    assert not of_a_program(handler)()
    assert not own(handler, "multiworlds")()
    assert not own(handler, None)()


@pytest.mark.parametrize("starter", ["multiworld.run.workers.fork_server", "multiworld.launch.child"])
def test_a_program_that_the_package_starts_is_in_the_middle_of_nothing(starter):
    assert not own(of_a_program(own(in_the_middle)), starter)()
    assert own(of_a_program(own(of_a_program(own(in_the_middle)))), starter)()


def test_the_thread_that_must_not_wait_has_another_one_do_it():
    """What a program's destructor calls there, while the collector runs, would hold up signs of life."""
    go, seen, done = threading.Event(), [], []

    def work():
        never_wait()
        seen.append(of_a_program(own(in_the_middle))())
        seen.append(in_time(lambda: done.append(go.wait(PATIENCE)) is None, PATIENCE, "m8d-test"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert (seen, done) == ([True, False], [])
    go.set()
    until(lambda: done == [True])
    until(lambda: not [each for each in threading.enumerate() if each.name == "m8d-test"])


def elsewhere(call):
    """What `call` returns in another thread."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(call()))
    thread.start()
    thread.join(PATIENCE)
    return seen[0]


def test_no_handler_runs_in_another_thread():
    assert not elsewhere(own(in_the_middle))
    assert not elsewhere(own(of_a_program(own(in_the_middle)))), "a function given to on_break"


def test_a_destructor_is_in_the_middle_of_the_call_in_which_the_collector_runs_in_any_thread():
    source = """
import weakref
class Owner:
    def __del__(self): seen.append(close())
def call():
    Owner()
    weakref.finalize(owner := type("", (), {})(), lambda: seen.append(close()))
    del owner
    return list(seen)
"""
    collects = of_module("program", source, close=of_a_program(own(in_the_middle)), seen=(seen := []))
    assert elsewhere(own(own(collects))) == [True, True]
    seen.clear()
    assert elsewhere(collects) == [False, False]


def test_it_returns_what_the_function_returns_and_runs_it_in_its_own_context():
    said = contextvars.ContextVar("said", default="")
    said.set("here")
    seen = []
    for result in (True, False):
        assert in_time(lambda r=result: seen.append(said.get()) or r, PATIENCE, "m8d-close-w") is result
    assert seen == ["here", "here"]


def test_what_takes_too_long_goes_on():
    bell, rung = threading.Event(), []
    begun = time.monotonic()
    assert not in_time(lambda: rung.append(bell.wait(PATIENCE)) or True, 0.05, "m8d-close-w")
    assert time.monotonic() - begun < PATIENCE
    bell.set()
    until(lambda: rung == [True])


def test_without_a_thread_nothing_is_done(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    assert not in_time(lambda: done.append(1) or True, PATIENCE, "m8d-close-w")
    assert done == []
