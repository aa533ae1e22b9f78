"""Threads that read from memory: each call has one of its own, and none stays without calls."""

from __future__ import annotations

import os
import threading
import time

import pytest

from multiworld._net.lane import reading_threads

PATIENCE = 120.0  # seconds; nothing takes that long when all is well


@pytest.fixture(autouse=True)
def none_left(monkeypatch):
    monkeypatch.setattr(reading_threads, "_IDLE", 0.02)
    until(lambda: not alive())
    yield
    until(lambda: not alive())
    assert not reading_threads._free


def alive():
    return [each for each in threading.enumerate() if each.name == "m8d-read"]


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_call_that_stays_holds_up_no_other():
    stays, made = threading.Event(), threading.Event()
    reading_threads.run(lambda: stays.wait(PATIENCE))
    reading_threads.run(made.set)
    assert made.wait(PATIENCE)
    assert not stays.is_set()
    stays.set()


def test_a_free_thread_takes_the_next_call(monkeypatch):
    monkeypatch.setattr(reading_threads, "_IDLE", PATIENCE)
    idents = []
    for number in range(3):
        reading_threads.run(lambda: idents.append(threading.get_ident()))
        until(lambda number=number: len(idents) > number and reading_threads._free)
    assert len(set(idents)) == 1
    monkeypatch.setattr(reading_threads, "_IDLE", 0.0)
    reading_threads.run(lambda: None)


def test_each_call_is_made_once_though_threads_end_meanwhile(monkeypatch):
    monkeypatch.setattr(reading_threads, "_IDLE", 0.0)
    made = []
    for number in range(500):
        reading_threads.run(lambda number=number: made.append(number))
    until(lambda: len(made) == 500)
    assert sorted(made) == list(range(500))


def test_a_thread_that_is_taken_at_its_end_makes_the_call(monkeypatch):
    class Taken(list):
        def remove(self, thread):
            if made.is_set():
                super().remove(thread)
            else:
                thread.take(self.pop() and made.set)
                raise ValueError

    made = threading.Event()
    monkeypatch.setattr(reading_threads, "_free", Taken())
    reading_threads.run(lambda: None)
    assert made.wait(PATIENCE)


def test_where_there_is_no_thread_the_caller_hears_of_it(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        reading_threads.run(lambda: None)


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(reading_threads, "_IDLE", PATIENCE)
    reading_threads.run(lambda: None)
    until(lambda: reading_threads._free)
    pid = os.fork()
    if not pid:
        made = threading.Event()
        reading_threads.run(made.set)
        os._exit(0 if made.wait(PATIENCE / 3) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    monkeypatch.setattr(reading_threads, "_IDLE", 0.0)
    reading_threads.run(lambda: None)
