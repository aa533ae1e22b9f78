"""A store that this process serves: not closed while other members read that the generation has begun."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from multiworld._generation.resources import READ_WITHIN, Holdings


@pytest.mark.parametrize(
    ("serves", "size", "waits"), [(True, 2, True), (False, 2, False), (True, 1, False), (True, 200, True)]
)
def test_a_world_that_is_closed_at_once_lets_the_others_read(serves, size, waits):
    closed = []
    store = SimpleNamespace(serves=serves, close=lambda: closed.append(time.monotonic()))
    began = time.monotonic()
    holdings = Holdings(SimpleNamespace(store=store, roster=SimpleNamespace(size=size)))
    holdings.release_store()
    holdings.release_store()
    assert len(closed) == 1
    assert (closed[0] - began >= READ_WITHIN) is waits
    if size == 200:
        assert closed[0] - began >= 0.5


def test_one_that_is_old_is_closed_at_once():
    closed = []
    store = SimpleNamespace(serves=True, close=lambda: closed.append(time.monotonic()))
    holdings = Holdings(SimpleNamespace(store=store, roster=SimpleNamespace(size=2)))
    holdings._read_by_all = began = time.monotonic()
    holdings.release_store()
    assert closed[0] - began < READ_WITHIN
