"""The thread that looks after a store that is a list of addresses."""

from __future__ import annotations

import logging
import threading

import pytest

pytest.importorskip("torch")

from multiworld._net.stores import listed


def test_the_thread_goes_on_after_any_error(monkeypatch, caplog):
    """No descriptor, or thread, may be left for a while: what it does not do then, it does afterwards."""
    monkeypatch.setattr(listed, "_KEEP_EVERY", 0.001)
    server = listed.ListedServer("list", ())
    turns, enough = [], threading.Event()

    def once():
        turns.append(None)
        if len(turns) < 4:
            raise (
                RuntimeError("can't start new thread")
                if len(turns) < 3
                else OSError(24, "Too many open files")
            )
        enough.set()

    monkeypatch.setattr(server, "_keep_once", once)
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=server._keep, daemon=True)
        thread.start()
        assert enough.wait(10)
        server._ended.set()
        thread.join(10)
    assert not thread.is_alive()
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2, "each kind once"
    assert "can't start new thread" in said[0]
    assert "Too many open files" in said[1]
