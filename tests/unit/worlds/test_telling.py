"""What a generation tells of its end: each step once, in order, by one thread at a time."""

from __future__ import annotations

import threading

import pytest

from multiworld._generation import telling as telling_module
from multiworld._generation.telling import Telling


def test_a_breakage_is_told_once():
    told = []
    telling = Telling("w")
    for _ in range(2):
        telling.broke(lambda: told.append("report"), lambda: told.append("broken"))
    telling.closed(lambda: told.append("closed"))
    assert told == ["report", "broken", "closed"]


def test_a_close_in_the_middle_of_the_breakage_is_told_after_it():
    """Of a subscriber in the same thread, and of another thread meanwhile."""
    told = []
    telling = Telling("w")

    def closes():
        telling.broke(lambda: told.append("again"))
        telling.closed(lambda: told.append("closed"))
        other = threading.Thread(target=telling.closed, args=(lambda: told.append("closed there"),))
        other.start()
        other.join()
        told.append("first")

    telling.broke(closes, lambda: told.append("second"))
    assert told == ["first", "second", "closed", "closed there"]


def test_what_comes_when_the_last_step_has_been_taken_is_told_by_the_thread_that_took_it(monkeypatch):
    told, take = [], telling_module.take_from
    telling = Telling("w")

    def takes_late(*args):
        take(*args)
        if told == ["broken"]:
            telling.closed(lambda: told.append("closed"))
            told.append("left to this thread")

    monkeypatch.setattr(telling_module, "take_from", takes_late)
    telling.broke(lambda: told.append("broken"))
    assert told == ["broken", "left to this thread", "closed"]


def test_ctrl_c_in_a_step_leaves_none_out():
    told = []
    telling = Telling("w")

    def interrupted():
        telling.closed(lambda: told.append("closed"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        telling.broke(interrupted, lambda: told.append("broken"))
    assert told == ["broken", "closed"]
    telling.closed(lambda: told.append("later"))
    assert told[-1] == "later"


def test_a_close_waits_for_the_thread_that_tells_of_the_breakage_but_not_for_ever():
    told, begun, go_on = [], threading.Event(), threading.Event()
    telling = Telling("w")

    def holds():
        begun.set()
        go_on.wait(60.0)

    other = threading.Thread(target=telling.broke, args=(holds,))
    other.start()
    assert begun.wait(60.0)
    telling.closed(lambda: told.append("closed"))
    telling.settle(0.01)
    assert told == []
    go_on.set()
    telling.settle(60.0)
    assert told == ["closed"]
    other.join()


def test_a_subscriber_that_closes_the_world_does_not_wait_for_itself():
    told = []
    telling = Telling("w")

    def closes():
        telling.closed(lambda: told.append("closed"))
        telling.settle(1000.0)
        told.append("goes on")

    telling.broke(closes)
    telling.settle(1000.0)
    assert told == ["goes on", "closed"]
