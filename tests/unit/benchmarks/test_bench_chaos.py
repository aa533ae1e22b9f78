"""What the part chaos makes of what was told."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

from benchmarks.chaos.part import Told, figures, rate, standstill, way

# Two members' reports: one is a step behind, and they stand still from 1.0 to 3.5.
TRACK = [
    (0.0, 1, 100), (0.1, 1, 99), (1.0, 1, 140), (1.1, 1, 140), (3.0, 1, 140), (3.5, 4, 141), (4.0, 4, 160), (4.1, 4, 159)
]  # fmt: skip


def test_steps_a_second_and_the_longest_standstill():
    assert rate(TRACK[:-1]) == pytest.approx(15.0)
    assert standstill(TRACK) == pytest.approx(2.5)
    assert standstill(list(reversed(TRACK))) == pytest.approx(2.5), (
        "members are not heard in the order of time"
    )


def test_a_member_that_was_stopped_tells_what_is_over():
    assert way([*TRACK, (4.2, 1, 141)]) == way(TRACK)


def test_a_world_that_began_anew_is_no_figure():
    with pytest.raises(RuntimeError, match="after 160 steps, in generation 4, there were 3 in 5"):
        rate([*TRACK, (5.0, 5, 3)])


def test_each_phase_is_beside_its_own_calm():
    told = Told(
        calm=[40.0, 20.0, 40.0], wild=[38.0, 19.0, 40.0], still=[500.0] * 3, sizes=[6, 7], reformed=[30.0],
        broken=["process 3, pair3: gone"], held=[3.0, 1.0, 2.0],
    )  # fmt: skip
    options = argparse.Namespace(every=2.0, hang_timeout=0.5, secure=False)
    found = {each.name: each for each in figures(told, Counter(kill=2, start=1), options)}
    assert (found["steps"].value, found["steps"].met) == (0.95, True)
    assert "2 kill, 1 start), of 6.5 members on average" in found["steps"].note
    assert (found["healthy/broken"].value, found["healthy/broken"].met) == (1.0, False)
    assert found["descriptors"].value == 2.0
