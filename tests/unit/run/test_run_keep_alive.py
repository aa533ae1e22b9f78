"""What keeps a node in torch's rendezvous ends with the launcher; a node that is dropped comes back."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from kits.meetkit import PATIENCE, until

from multiworld.run.nodes.rendezvous import BackgroundRendezvous, stop_keeping_alive


def test_torchs_thread_is_ended():
    stopped = []
    stop_keeping_alive(SimpleNamespace(_stop_heartbeats=lambda: stopped.append(True)))
    assert stopped == [True]


def test_one_that_does_not_end_is_not_waited_for():
    go = threading.Event()
    began = time.monotonic()
    stop_keeping_alive(SimpleNamespace(_stop_heartbeats=lambda: go.wait(PATIENCE)), 0.05)
    assert time.monotonic() - began < PATIENCE / 2
    go.set()


def test_errors_and_other_handlers_do_not_matter():
    def fails():
        raise OSError

    stop_keeping_alive(SimpleNamespace(_stop_heartbeats=fails))
    stop_keeping_alive(SimpleNamespace())


@pytest.mark.parametrize("dropped", [True, False])
def test_a_node_that_was_dropped_meets_the_others_again(dropped):
    """torch's rendezvous does not take it back, and says of no node that it waits."""
    state, looked, told = SimpleNamespace(participants={} if dropped else {"me": 0}), [], []

    def meet():
        state.participants = {"me": 0}
        return "met"

    handler = SimpleNamespace(
        _this_node="me", _state_holder=SimpleNamespace(state=state), next_rendezvous=meet,
        num_nodes_waiting=lambda: looked.append(True) or 0,
    )  # fmt: skip
    background = BackgroundRendezvous(handler, lambda info: info, told.append, returns=False)
    background.start()
    background.look()
    until(lambda: told if dropped else looked)
    background.look()
    background.stop()
    until(lambda: all(each.name != "m8d-nodes-rendezvous" for each in threading.enumerate()))
    assert told == ["met"] * dropped
