"""For whom members wait in collectives."""

from __future__ import annotations

import pytest

from multiworld._core.operations.lateness import waited_for
from multiworld._core.operations.report import MemberReport, Operation


def call(number, began, *, ranks=(0, 1, 2), group=0):
    return Operation(group, ranks, "all_reduce", number, 4, None, None, began, began / 2)


def test_the_last_one_is_who_the_others_waited_for():
    found = waited_for(
        {
            0: MemberReport(0, {}, (call(1, 9.0), call(2, 5.0))),
            1: MemberReport(1, {}, (call(1, 8.5), call(2, 4.0))),
            2: MemberReport(2, {}, (call(1, 8.0), call(2, 4.5))),
        }
    )
    assert found == {0: 0.0, 1: pytest.approx(1.5), 2: pytest.approx(1.5)}


def test_little_does_not_count_though_it_comes_often():
    calls = {
        rank: tuple(call(n, 9.0 - n / 10 - rank * 0.019, ranks=(0, 1)) for n in range(1, 60))
        for rank in (0, 1)
    }
    assert waited_for({rank: MemberReport(rank, {}, each) for rank, each in calls.items()}) == {
        0: 0.0,
        1: 0.0,
    }


def test_what_not_all_have_in_their_reports_does_not_count():
    message = Operation(0, (0, 1), "send", None, 4, 1, 0, 3.0, 2.0)
    reports = {
        0: MemberReport(0, {}, (call(1, 9.0), message, call(7, 5.0, ranks=(0, 1), group=3))),
        1: MemberReport(1, {}, (call(1, 1.0), call(7, 4.0, ranks=(0, 1), group=3))),
        2: None,
    }
    assert waited_for(reports) == {0: 0.0, 1: pytest.approx(1.0)}


def test_members_that_differ_in_the_group_are_not_compared():
    reports = {
        0: MemberReport(0, {}, (call(1, 9.0, ranks=(0, 1)),)),
        1: MemberReport(1, {}, (call(1, 1.0, ranks=(1, 2)),)),
    }
    assert waited_for(reports) == {0: 0.0, 1: 0.0}
    assert waited_for({}) == {}
