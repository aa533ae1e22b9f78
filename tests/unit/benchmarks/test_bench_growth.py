"""What the part growth makes of what was measured."""

from __future__ import annotations

import pytest

from benchmarks.figures.goals import answers
from benchmarks.figures.table import spread
from benchmarks.growth import part as growth
from benchmarks.growth.part import Changes


def line(held, longest, size=4):
    return {"held": held, "longest": longest, "size": size}


def test_a_change_counts_with_the_member_that_was_held_longest():
    found = Changes()
    for number in range(1, 101):
        found.add([line(0.001 * number, 0.2), line(0.0005, 0.3 + 0.001 * number)], 4)
    figure = growth.held("grow/held", found, "one comes")
    assert figure.value == pytest.approx(99.01)
    assert (figure.low, figure.high, figure.samples) == (pytest.approx(95.05), pytest.approx(100), 100)
    assert figure.low <= figure.value <= figure.high
    assert figure.met is False
    assert figure.series["step"][:2] == [301, 302]
    assert "the longest step: median 350.5 ms" in figure.note
    assert "for certain" not in figure.note
    assert [target.limit for target, taken in answers([figure]) if taken] == ["≤ 10 ms"]


def test_the_99th_percentile_of_a_few_changes_is_unsure():
    found = Changes()
    for number in range(5):
        found.add([line(0.001 + 0.0001 * number, 0.01)], 4)
    figure = growth.held("grow/held", found, "one comes")
    assert (figure.met, figure.unsure) == (True, True)
    assert "fewer than 100 changes cannot show it for certain" in figure.note
    assert spread(figure) == "1.38 to 1.4; max 1.4"


def test_what_is_no_change():
    with pytest.raises(RuntimeError, match="a world of 4 was to come"):
        Changes().add([line(0.1, 0.2), line(0.1, 0.2, size=3)], 4)


def test_a_replacement_lasts_until_the_last_one_has_operated():
    old = [{"noticed": 1.01 + each, "first": 1.2, "size": 4, "whole": True} for each in (0.0, 0.01)]
    new = {"first": 1.25, "size": 4, "whole": True}
    assert growth.replaced({"at": 1.0, "lines": [*old, new]}, 4) == pytest.approx((250, 20))


@pytest.mark.parametrize("wrong", [{"size": 3}, {"whole": False}])
def test_what_is_no_replacement(wrong):
    old = {"noticed": 1.01, "first": 1.2, "size": 4, "whole": True}
    new = {"first": 1.25, "size": 4, "whole": True}
    with pytest.raises(RuntimeError, match="not a world of 4 members with the state"):
        growth.replaced({"at": 1.0, "lines": [old, new | wrong]}, 4)
