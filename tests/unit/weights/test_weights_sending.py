"""What an engine hears while the digests of a version are computed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from multiworld.weights import publisher, shelf


@pytest.fixture
def slow(monkeypatch):
    """Digests that take until they are let."""
    let, calls = threading.Event(), []

    def summed(room):
        calls.append(room)
        assert let.wait(30)
        return f"digest of {room}"

    monkeypatch.setattr(shelf, "summed", summed)
    return SimpleNamespace(let=let, calls=calls)


def version():
    return shelf.Version("session", 3, 100, [], ["a", "b"])


def test_the_digests_are_computed_once_and_not_waited_for_longer_than_said(slow):
    it = version()
    assert it.head(0.01) is None
    assert it.head(0.01) is None
    slow.let.set()
    head = it.head(30)
    assert (head.version, head.digests) == (3, ("digest of a", "digest of b"))
    assert it.head(0.0) == head
    assert slow.calls == ["a", "b"]


def test_an_error_of_the_digests_is_raised_to_all_that_wait(monkeypatch):
    def summed(_room):
        raise MemoryError("no room")

    monkeypatch.setattr(shelf, "summed", summed)
    it = version()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            it.head(30)


def test_an_engine_hears_that_its_trainer_works_while_the_digests_are_computed(slow, monkeypatch):
    """It would take the trainer for lost after the world's timeout, and never get weights whose digests take longer."""
    sent = []

    def send(_world, what):
        sent.append(what["kind"])
        if len(sent) == 3:
            slow.let.set()

    answers = iter([{"need": []}, {"got": 3}])
    monkeypatch.setattr(publisher.wire, "send", send)
    monkeypatch.setattr(publisher.wire, "receive", lambda _world: next(answers))
    mine = SimpleNamespace(_plan=SimpleNamespace(timeout=4 * 0.01))
    assert publisher.Publisher._send(mine, object(), version())
    assert sent[:3] == ["idle"] * 3
    assert sent[-1] == "version"
