"""What the part chaos makes of what was told."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter

import pytest

from benchmarks.chaos import part as chaos
from benchmarks.chaos.part import Told, figures, rate, standstill, way
from benchmarks.measuring.part import Run

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
        calm=[40.0, 20.0, 40.0], wild=[38.0, 19.0, 40.0], still=[500.0] * 3, sizes=[4] * 4 + [8] * 8, reformed=[30.0],
        broken=["process 3, pair3: gone"], held=[3.0, 1.0, 2.0],
    )  # fmt: skip
    options = argparse.Namespace(every=2.0, hang_timeout=0.5, secure=False)
    found = {each.name: each for each in figures(told, Counter(kill=2, start=1), options)}
    assert (found["steps"].value, found["steps"].met) == (0.95, True)
    assert "2 kill, 1 start), of 6.0 members on average, beside calm phases of 6;" in found["steps"].note
    assert (found["healthy/broken"].value, found["healthy/broken"].met) == (1.0, False)
    assert found["descriptors"].value == 2.0


class Crowd:
    """Stands in for the process that members are forked from: a pair breaks, and members reform, as they settle."""

    def __init__(self) -> None:
        self._found: dict[str, list] = {"broken": [], "reformed": []}

    def call(self, name, **_args):
        if name == "settle":
            self._found = {"broken": ["process 3, pair3: gone"], "reformed": [0.03]}
        elif name == "reports":
            found, self._found = self._found, {"broken": [], "reformed": [0.02]}
            return found | {"track": TRACK, "sizes": [7], "more_descriptors": 2}
        return name


def test_a_healthy_world_that_breaks_while_members_settle_counts(monkeypatch):
    monkeypatch.setattr(chaos, "Ranks", lambda *_args, **_more: contextlib.nullcontext((Crowd(),)))
    remarks = []
    options = argparse.Namespace(seconds=2.0, every=2.0, hang_timeout=0.5, secure=False, seed=1)
    found = {each.name: each for each in chaos.measure(Run(options=options, remark=remarks.append))}
    assert (found["healthy/broken"].value, found["healthy/broken"].met) == (1.0, False)
    assert remarks == ["chaos: a world broke though nothing was done to its members: process 3, pair3: gone"]
    assert (found["reform"].samples, found["reform"].quantiles["max"]) == (2, pytest.approx(30.0))
    assert found["descriptors"].value == 2.0
