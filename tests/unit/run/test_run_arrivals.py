"""Signals that come while a launcher tells what happens: whose exception goes where, and what is noted all the same."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from multiworld.run.events import EventBus, RunEvent
from multiworld.run.signals import REPEATS, Arrivals, is_another, repeats_ignored


class CameError(Exception):
    """As torch's SignalException: an Exception that a signal's handler raises."""


def came(number, frame):
    raise CameError(signal.Signals(number).name)


@pytest.fixture
def arrivals():
    before = signal.signal(signal.SIGUSR1, came)
    found = Arrivals()
    found.open()
    yield found
    found.close()
    signal.signal(signal.SIGUSR1, before)


def test_a_listeners_fault_stays_there_and_a_signals_exception_does_not(caplog):
    bus = EventBus(signals=(CameError,))
    heard = []
    for error in (ValueError("a fault"), CameError("SIGTERM"), ZeroDivisionError("another")):
        bus.subscribe(lambda _, error=error: (_ for _ in ()).throw(error))
    bus.subscribe(heard.append)
    with pytest.raises(CameError, match="SIGTERM"):
        bus.publish(RunEvent(0.0))
    assert heard == [RunEvent(0.0)], "the others hear of it first"
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, ZeroDivisionError]


def test_without_signals_every_exception_is_a_listeners_fault(caplog):
    bus = EventBus()
    bus.subscribe(lambda _: came(signal.SIGTERM, None))
    bus.publish(RunEvent(0.0))
    assert len(caplog.records) == 1


def test_a_signal_is_noted_where_its_exception_was_swallowed(arrivals):
    with pytest.raises(CameError):  # as an ``except Exception`` in logging does
        os.kill(os.getpid(), signal.SIGUSR1)
    assert arrivals.take([signal.SIGTERM, signal.SIGUSR1]) == signal.SIGUSR1
    assert arrivals.take([signal.SIGTERM, signal.SIGUSR1]) is None, "once"


def test_other_signals_are_nothing(arrivals):
    with pytest.raises(CameError):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert arrivals.take([signal.SIGTERM]) is None


def test_it_leaves_what_was_before():
    found = Arrivals()
    found.open()
    found.open()
    found.close()
    found.close()
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_of_the_main_thread_nothing_is_noted():
    found = Arrivals()
    thread = threading.Thread(target=found.open)
    thread.start()
    thread.join()
    assert signal.set_wakeup_fd(-1) == -1
    found.close()


def test_a_forked_childs_signals_are_its_own(arrivals):
    child = os.fork()
    if child == 0:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except CameError:
            os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arrivals.take([signal.SIGUSR1]) is None


def test_which_signal_is_a_second_one():
    first = signal.SIGHUP
    assert not is_another(None, first, 9.0)
    assert not is_another(first, first, REPEATS / 2)
    assert is_another(first, first, REPEATS)
    assert is_another(signal.SIGTERM, first, 0.0)
    assert is_another(signal.SIGINT, signal.SIGINT, 0.0), "a person presses Ctrl-C twice"


def test_a_handler_that_is_not_called_for_the_same_signal_again(monkeypatch):
    before = signal.signal(signal.SIGUSR1, came)
    try:
        with repeats_ignored(signal.SIGUSR1):
            signal.raise_signal(signal.SIGUSR1)
            monkeypatch.setattr("multiworld.run.signals.REPEATS", 0.0)
            with pytest.raises(CameError):
                signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is came
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with repeats_ignored(signal.SIGUSR1):
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
