"""What an agent is to hear of the other nodes, and the signs that they are watched."""

from __future__ import annotations

import logging
import select

import pytest

from multiworld.run.events import EventBus, Note
from multiworld.run.nodes import shown_life
from multiworld.run.nodes.agent_events import AgentEvents
from multiworld.run.nodes.interface import Over, Stop
from multiworld.run.nodes.shown_life import ShownLife


def readable(events):
    return bool(select.select([events], [], [], 0)[0])


def test_events_of_the_run_go_to_the_bus_and_all_others_to_the_agent():
    bus, published = EventBus(), []
    bus.subscribe(published.append)
    events = AgentEvents(bus)
    assert events.poll() == []
    assert not readable(events)
    events.put(Stop("why"))
    events.note(logging.WARNING, "text")
    events.put(Over())
    assert readable(events)
    assert published == []
    assert events.poll() == [Stop("why"), Over()]
    assert [(type(each), each.level, each.text) for each in published] == [(Note, logging.WARNING, "text")]
    assert not readable(events)
    assert events.poll() == []
    events.close()
    events.put(Over())  # nothing wakes any more


def test_more_events_than_a_socket_takes():
    events = AgentEvents(EventBus())
    for _ in range(200_000):
        events.put(Over())
    assert len(events.poll()) == 200_000
    assert not readable(events)
    events.close()


class Signs:
    def __init__(self):
        self.said = []

    def alive(self):
        self.said.append("alive")

    def seatless(self):
        self.said.append("seatless")

    def free(self):
        self.said.append("free")


@pytest.fixture
def now(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(shown_life.time, "monotonic", lambda: clock[0])
    return clock


def test_a_lost_seat_waits_for_the_agent_for_half_a_second_once(now):
    signs = Signs()
    life = ShownLife(signs)
    life.polled()
    now[0] = 200.0
    life.show()
    life.seat_lost()
    now[0] = 200.5
    life.show()
    assert signs.said == ["alive", "alive"]
    now[0] = 200.6
    life.show()
    life.show()
    assert signs.said[2:] == ["seatless", "alive", "alive"]
    life.free()
    assert signs.said[-1] == "free"


def test_an_agent_that_has_polled_since_ends_its_workers_itself(now):
    signs = Signs()
    life = ShownLife(signs)
    life.seat_lost()
    now[0] = 100.2
    life.polled()
    now[0] = 300.0
    life.show()
    assert signs.said == ["alive"]


def test_none_are_shown_where_they_are_not_asked_for():
    life = ShownLife(None)
    life.seat_lost()
    life.show()
    life.free()
