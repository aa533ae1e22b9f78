"""The bus, and the records it hands out."""

from __future__ import annotations

import logging
import sys
import threading
from asyncio import CancelledError

import pytest

from multiworld.events import Breakage, Bus, Cause, Event, State, WorldBroken, bus, subscribe

EVENT = Event("w", 1, 0, 2.5)


def test_every_subscriber_hears_in_order_until_it_leaves():
    heard: list[str] = []
    here = Bus()
    stop_first = here.subscribe(lambda event: heard.append(f"first {event.world}"))
    here.subscribe(lambda event: heard.append(f"second {event.world}"))
    here.publish(EVENT)
    stop_first()
    stop_first()
    here.publish(EVENT)
    assert heard == ["first w", "second w", "second w"]


def test_the_same_function_twice_is_two_subscriptions():
    heard: list[Event] = []
    here = Bus()
    stop = here.subscribe(heard.append)
    here.subscribe(heard.append)
    stop()
    here.publish(EVENT)
    assert heard == [EVENT]


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), CancelledError("x"), GeneratorExit()])
def test_a_subscriber_that_fails_is_reported_and_the_others_hear(error, caplog):
    heard: list[Event] = []

    def fail(event: Event) -> None:
        raise error

    reported: list[BaseException] = []
    for here in (Bus(lambda event, exc: reported.append(exc)), Bus()):
        here.subscribe(fail)
        here.subscribe(heard.append)
        with caplog.at_level(logging.ERROR, logger="multiworld.events"):
            here.publish(EVENT)
    assert heard == [EVENT, EVENT]
    assert reported == [error]
    assert [record.exc_info[1] for record in caplog.records] == [error], "by default it is logged"


def test_an_interrupt_is_not_swallowed():
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    here, heard = Bus(), []
    here.subscribe(interrupt)
    here.subscribe(heard.append)
    with pytest.raises(KeyboardInterrupt):
        here.publish(EVENT)
    assert heard == [EVENT], "the others have heard of it by then"


def test_subscriptions_made_at_once_are_all_there():
    here, heard = Bus(), []
    gate = threading.Barrier(8)

    def many() -> None:
        gate.wait()
        for _ in range(300):
            here.subscribe(heard.append)
            here.subscribe(lambda _: None)()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=many) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    here.publish(EVENT)
    assert len(heard) == 8 * 300


def test_the_process_has_a_bus():
    heard: list[Event] = []
    stop = subscribe(heard.append)
    event = WorldBroken("w", 1, 0, 1.0, Breakage(Cause.HUNG, (2,), "silent", 1.0))
    bus.publish(event)
    stop()
    bus.publish(event)
    assert heard == [event]


def test_states_and_causes_are_their_words():
    assert str(State.BROKEN) == "broken" == State.BROKEN
    assert {str(each) for each in Cause} == {"crashed", "hung", "unreachable", "left", "failed"}
    assert {f"{each}" for each in State} == {"joining", "active", "broken", "closed"}
