"""What keeps a node in torch's rendezvous ends with the launcher."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from kits.meetkit import PATIENCE

from multiworld.run.nodes.rendezvous import stop_keeping_alive


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
