"""Lengths of time."""

from __future__ import annotations

import datetime as dt

import pytest

from multiworld._core.durations import seconds


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (dt.timedelta(minutes=1, milliseconds=500), 60.5),
        (10**400, float("inf")),
        (-(10**400), float("-inf")),
        (float("inf"), float("inf")),
        (float("nan"), None),
        (True, None),
        ("3", None),
        (None, None),
    ],
)
def test_seconds(given, found):
    assert seconds(given) == found
