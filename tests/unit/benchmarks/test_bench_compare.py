"""Which figures count as changed, and which records are compared."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures.compare import Verdict, change, compare, growing
from benchmarks.figures.figure import Figure, Goal
from benchmarks.figures.records import PartRun, Record, previous


def figure(value: float, low: float, high: float, samples: int = 20, **more) -> Figure:
    fields = {"part": "latency", "name": "n", "unit": "ratio", **more}
    return Figure(value=value, low=low, high=high, samples=samples, **fields)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (figure(1.0, 0.9, 1.1), figure(1.3, 1.2, 1.4), Verdict.WORSE),
        (figure(1.3, 1.2, 1.4), figure(1.0, 0.9, 1.1), Verdict.BETTER),
        (figure(1.0, 0.9, 1.1), figure(1.2, 1.1, 1.3), None),  # they touch
        (figure(1.0, 0.9, 1.1), figure(1.05, 1.0, 1.2), None),
        (figure(1.0, 0.5, 2.0), figure(1.4, 1.3, 1.5), None),  # inside
        # Of a single sample no spread is known: a tenth on either side is taken.
        (figure(100.0, 100, 100, 1), figure(115.0, 115, 115, 1), None),
        (figure(100.0, 100, 100, 1), figure(130.0, 130, 130, 1), Verdict.WORSE),
        (figure(2.0, 1.9, 2.1, unit="GB/s"), figure(3.0, 2.9, 3.1, unit="GB/s"), Verdict.BETTER),
        (figure(2.0, 1.9, 2.1), figure(3.0, 2.9, 3.1, absolute_unit="GB/s"), Verdict.BETTER),
        (figure(2.0, 1.9, 2.1), figure(3.0, 2.9, 3.1, absolute_unit="us"), Verdict.WORSE),
        (figure(2.0, 1.9, 2.1), figure(3.0, 2.9, 3.1, goal=Goal(at_least=1.8)), Verdict.BETTER),
        (figure(2.0, 1.9, 2.1, unit="ms"), figure(9.0, 8.9, 9.1, unit="us"), None),
    ],
)
def test_a_change_is_more_than_the_spreads(before, after, verdict):
    found = change(before, after)
    assert (None if found is None else found.verdict) == verdict


QUARTILES = st.lists(st.floats(0.01, 100), min_size=3, max_size=3).map(sorted)


@given(QUARTILES, QUARTILES, st.sampled_from([None, Goal(at_most=1), Goal(at_least=1)]))
def test_a_change_back_is_the_opposite(one, other, goal):
    first, second = (figure(v, low, high, goal=goal) for low, v, high in (one, other))
    there, back = change(first, second), change(second, first)
    assert (there is None) == (back is None)
    if there and back:
        assert {there.verdict, back.verdict} == {Verdict.BETTER, Verdict.WORSE}
        assert growing(first) == (goal == Goal(at_least=1))


@given(QUARTILES)
def test_nothing_changes_against_itself(values):
    same = figure(values[1], values[0], values[2])
    assert change(same, same) is None


def test_two_runs_beside_each_other():
    goal = Goal(at_most=1.2)
    old = [
        figure(1.0, 0.9, 1.1, name="same"),
        figure(1.0, 0.9, 1.1, name="worse", goal=goal),
        figure(9.0, 8.9, 9.1, name="much better"),
        figure(1.0, 0.9, 1.1, name="gone"),
    ]
    new = [
        figure(1.05, 0.9, 1.1, name="same"),
        figure(1.5, 1.4, 1.6, name="worse", goal=goal),
        figure(1.0, 0.9, 1.1, name="much better"),
        figure(1.0, 0.9, 1.1, name="new"),
    ]
    found = compare(old, new)
    assert [(c.after.name, c.verdict, c.goal_lost) for c in found.changes] == [
        ("much better", Verdict.BETTER, False),
        ("worse", Verdict.WORSE, True),
    ]
    assert found.changes[1].factor == pytest.approx(1.5)
    assert (found.same, found.gone, found.new) == (1, ("latency/gone",), ("latency/new",))


def test_from_nothing_is_the_largest_change():
    old = [figure(0.0, 0.0, 0.0, name="zero"), figure(1.0, 1.0, 1.0, name="other")]
    new = [figure(1.0, 0.9, 1.1, name="zero"), figure(90.0, 89.0, 91.0, name="other")]
    found = compare(old, new).changes
    assert [(c.after.name, c.factor) for c in found] == [("zero", None), ("other", 90.0)]


MACHINE = {"cpu": "X", "cores": 2, "memory_gb": 25.3}


def record(day: int, form: str = "quick", *parts: str, machine=MACHINE) -> Record:
    figures = tuple(figure(1, 1, 1, part=part) for part in parts)
    runs = {part: PartRun(form) for part in parts}
    return Record(f"2026-11-{day:02}T00:00:00+00:00", "1", "", dict(machine), (), runs, figures)


def test_each_part_is_compared_with_its_last_run_of_the_same_form_and_machine():
    new = record(20, "quick", "latency", "worlds", "fanin")
    older = [
        record(10, "quick", "latency", "worlds"),
        record(12, "quick", "latency"),
        record(13, "full", "latency", "worlds"),
        record(14, "quick", "worlds", machine={**MACHINE, "cores": 64}),
        record(15, "quick", "worlds", machine={**MACHINE, "memory_gb": 512.0}),
        record(21, "quick", "latency", "worlds", "fanin"),
        new,
    ]
    found = previous(new, older)
    assert {part: each.when[8:10] for part, each in found.items()} == {"latency": "12", "worlds": "10"}


def test_a_part_that_gave_no_figures_is_not_compared_with():
    new = record(20, "quick", "latency")
    assert previous(new, [dataclasses.replace(record(10, "quick", "latency"), figures=())]) == {}
