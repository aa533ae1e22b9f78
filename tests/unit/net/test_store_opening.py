"""Opening a store where the host has too little left."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("torch")

from multiworld._net.stores.opening import open_in_time
from multiworld.errors import JoinAbandonedError


def test_a_host_without_threads_is_no_store_that_does_not_answer(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(JoinAbandonedError, match=r"not asked: can't start new thread.*\(ulimit -u\)"):
        open_in_time(
            "tcp://127.0.0.1:29511", world="w", serve=True, deadline=time.monotonic() + 30.0, cancelled=lambda: False
        )  # fmt: skip
