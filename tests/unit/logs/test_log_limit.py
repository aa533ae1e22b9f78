"""How many lines of one kind a log takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.logs.limit import RateLimit


def test_a_burst_then_one_at_a_time():
    limit = RateLimit(burst=3, every=2.0)
    assert [limit.take("a", 0.0) for _ in range(5)] == [0, 0, 0, None, None]
    assert limit.take("a", 1.9) is None
    assert limit.take("a", 2.0) == 3, "with how many were left out"
    assert limit.take("a", 2.1) is None
    assert limit.take("a", 100.0) == 1
    assert [limit.take("a", 100.0) for _ in range(3)] == [0, 0, None], "a pause gives no more than a burst"


def test_kinds_do_not_use_up_each_others_lines():
    limit = RateLimit(burst=1, every=60.0)
    assert limit.take("a", 0.0) == 0
    assert limit.take("a", 0.0) is None
    assert limit.take("b", 0.0) == 0


def test_what_was_not_used_for_longest_is_forgotten():
    limit = RateLimit(burst=1, every=60.0, kinds=2)
    assert [limit.take(kind, 0.0) for kind in "ab"] == [0, 0]
    assert limit.take("a", 0.0) is None
    assert limit.take("c", 0.0) == 0  # forgets "b"
    assert limit.take("a", 0.0) is None
    assert limit.take("b", 0.0) == 0


@given(st.lists(st.floats(0, 5), max_size=60))
def test_no_line_is_lost_without_being_counted(pauses):
    limit, now, came, told = RateLimit(burst=4, every=3.0), 0.0, 0, 0
    for pause in pauses:
        now += pause
        left_out = limit.take("a", now)
        came += left_out is not None
        told += left_out or 0
    last = limit.take("a", now + 100.0)
    assert last is not None
    assert came + told + last == len(pauses)
    assert came <= 4 + now / 3.0 + 1e-6
