"""When the calls that were blocked as a world broke have raised."""

from __future__ import annotations

import pytest

from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld._core.operations.log import ENDED, OperationLog
from multiworld._generation.unblocked import LOOKS, PAUSE, Unblocked
from multiworld.events import Breakage, Cause, WorldUnblocked, bus

BREAKAGE = Breakage(Cause.CRASHED, (1,), "its connection was closed", 10.0)
MEMBERS = tuple(Member(rank, "00" * 16, Endpoint("127.0.0.1", 1), 1, "alpha") for rank in range(2))
ROSTER = Roster("w", 3, 0, MEMBERS, bytes(16), 5.0)


@pytest.fixture
def heard():
    found = []
    forget = bus.subscribe(found.append)
    yield found
    forget()


def blocked():
    log = OperationLog(0, 2)
    entry = [log.world, "recv", None, 4, 1, 0, 9.0, None]
    log.append(entry)
    log.freeze(10.0)
    return log, entry


def test_it_is_told_once_the_last_call_has_raised(heard):
    log, entry = blocked()
    step = Unblocked(log, ROSTER, BREAKAGE)
    assert step() == PAUSE
    assert heard == []
    entry[ENDED] = 10.25
    assert step() is None
    assert heard == [WorldUnblocked("w", 3, 0, 10.25, 1, 0.25)]


def test_a_call_that_raised_before_the_verdict_took_no_time(heard):
    log, entry = blocked()
    entry[ENDED] = 9.99
    Unblocked(log, ROSTER, BREAKAGE)()
    assert heard[0].seconds == 0.0


def test_it_is_not_looked_for_ever(heard):
    log, _ = blocked()
    step = Unblocked(log, ROSTER, BREAKAGE)
    assert [step() for _ in range(LOOKS)] == [*[PAUSE] * (LOOKS - 1), None]
    assert heard == []
