"""What the worlds of a process share of a store."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("torch")

from multiworld._net.stores.shared import Shared, registry


def test_a_child_that_is_forked_while_another_thread_has_the_lock_begins_with_no_store():
    key = "file:///forked"
    with registry.slot(key):
        registry.put(key, Shared(key))
    with registry.lock:
        child = os.fork()
        if not child:
            signal.alarm(30)  # where it waits for its parent's thread
            new = registry.slot(key).acquire(blocking=False)
            os._exit(0 if new and registry.hold(key) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    held = registry.hold(key)
    assert held is not None, "the parent's"
    for _ in range(2):
        registry.release(held)
