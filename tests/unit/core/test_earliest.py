"""When something is due at the earliest in a table."""

from __future__ import annotations

import math

from multiworld._core.liveness.earliest import Earliest


def test_a_table_is_looked_at_when_something_may_be_due_and_not_before():
    table = {}
    due = Earliest(lambda: min(table.values(), default=math.inf))
    assert due.time == math.inf
    assert not due.passed(1e9)
    table["a"] = 5.0
    due.by(5.0)
    table["b"] = 7.0
    due.by(7.0)
    assert (due.time, due.looks) == (5.0, 0)
    table["a"] = 9.0  # it was put off, which is not told
    assert not due.passed(4.9)
    assert due.passed(5.0)
    assert due.looks == 1
    due.changed()
    assert not due.passed(5.0)
    assert (due.time, due.looks) == (7.0, 2)
    due.changed()
    due.by(1.0)
    assert due.time == 7.0, "what is in the table counts"
