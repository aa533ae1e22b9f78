"""A store that this process serves: not closed while other members read that the generation has begun."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from multiworld._generation import resources
from multiworld._generation.resources import READ_WITHIN, Holdings


@pytest.fixture
def slept(monkeypatch):
    """Seconds slept so far, on a clock that nothing else moves: how busy the machine is does not matter."""
    slept = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(resources, "time", clock)
    return slept


def holdings_of(serves, size, close):
    store = SimpleNamespace(serves=serves, close=close)
    return Holdings(SimpleNamespace(store=store, roster=SimpleNamespace(size=size)))


@pytest.mark.parametrize(
    ("serves", "size", "least", "most"),
    [(True, 2, READ_WITHIN, 0.1), (False, 2, 0.0, 0.0), (True, 1, 0.0, 0.0), (True, 200, 0.5, 5.0)],
)
def test_a_world_that_is_closed_at_once_lets_the_others_read(slept, serves, size, least, most):
    closed = []
    holdings = holdings_of(serves, size, lambda: closed.append(sum(slept)))
    holdings.release_store()
    holdings.release_store()
    assert len(closed) == 1
    assert least - 1e-9 <= closed[0] <= most


def test_one_that_is_old_is_closed_at_once(slept):
    closed = []
    holdings = holdings_of(True, 2, lambda: closed.append(sum(slept)))
    slept.append(READ_WITHIN)
    holdings.release_store()
    assert closed == [READ_WITHIN]
