"""Which applications for admission the leader has still to read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.run.nodes.applications import Applications


def test_one_after_the_other():
    found = Applications()
    assert found.due() == [1, 2, 3]
    found.take([1, 2])
    assert found.due() == [3, 4, 5]
    found.take([])
    assert found.due() == [3, 4, 5]


def test_a_number_that_comes_after_a_higher_one_is_still_due():
    found = Applications()
    found.take([2])
    assert found.due() == [1, 3, 4, 5]
    found.take([1])
    assert found.due() == [3, 4, 5]


def test_a_number_that_never_comes_keeps_no_other_back():
    found = Applications()
    for number in range(2, 9):
        assert number in found.due()
        found.take([number])
    assert found.due() == [1, 9, 10, 11]


@given(st.permutations(range(1, 9)), st.integers(1, 3))
def test_each_is_read_once_in_whatever_order_they_come(order, at_once):
    found, there, taken = Applications(), set(), []
    for begin in range(0, 8, at_once):
        there.update(order[begin : begin + at_once])
        for _ in range(8):
            read = [number for number in found.due() if number in there]
            taken += read
            found.take(read)
    assert sorted(taken) == list(range(1, 9))
