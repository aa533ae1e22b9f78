"""Quantiles, ratios and figures: against values by hand, numpy's rule, and round trips."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures.figure import (
    Figure,
    Goal,
    distribution,
    from_json,
    quantile,
    quartiles,
    ratio,
    summary,
    to_json,
)

NUMBERS = st.floats(-1e9, 1e9)
NAMES = st.text(min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 0.25, 1.75),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 0.75, 3.25),
        ([10.0, 20.0, 30.0], 0.9, 28.0),
        ([10.0, 20.0, 30.0], 0.0, 10.0),
        ([10.0, 20.0, 30.0], 1.0, 30.0),
    ],
)
def test_quantiles_by_hand(values, q, expected):
    assert quantile(values, q) == pytest.approx(expected)


@given(st.lists(NUMBERS, min_size=2, max_size=40))
def test_quartiles_are_those_of_the_standard_library(values):
    expected = statistics.quantiles(values, n=4, method="inclusive")
    assert quartiles(values) == pytest.approx(tuple(expected), rel=1e-9, abs=1e-6)


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_grow_and_stay_inside(values, one, other):
    low, high = sorted((one, other))
    assert min(values) <= quantile(values, low) <= max(values)
    margin = 1e-9 * max(1.0, *map(abs, values))  # rounding between neighbours
    assert quantile(values, low) <= quantile(values, high) + margin


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_quantiles_of_nothing(values, q):
    with pytest.raises(ValueError, match="give values"):
        quantile(values, q)


def test_a_ratio_is_taken_round_by_round():
    """The machine was half as fast in rounds 2 and 3: the ratio of the medians would be 2/3, that of rounds is 1/2."""
    figure = ratio("p", "n", ours=[1, 2, 2, 1, 2], stock=[2, 4, 4, 2, 4], absolute_unit="us")
    assert (figure.value, figure.low, figure.high, figure.samples) == (0.5, 0.5, 0.5, 5)
    assert (figure.absolute, figure.baseline, figure.unit) == (2, 4, "ratio")
    skewed = ratio("p", "n", ours=[1, 2, 9], stock=[2, 4, 6])
    assert skewed.value == 0.5
    assert skewed.absolute / skewed.baseline == 0.5
    assert ratio("p", "n", ours=[1, 4, 2], stock=[1, 8, 2]).value == 1.0


@pytest.mark.parametrize(("ours", "stock"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0, 0.0])])
def test_a_ratio_needs_pairs_and_a_divisor(ours, stock):
    with pytest.raises(ValueError, match="p/n"):
        ratio("p", "n", ours, stock)


def test_goals_include_their_limit():
    assert Goal(at_most=0.9).met(0.9)
    assert not Goal(at_most=0.9).met(0.9001)
    assert Goal(at_least=1.8).met(1.8)
    assert not Goal(at_least=1.8).met(1.79)
    assert (str(Goal(at_most=0.9)), str(Goal(at_least=1.8)), str(Goal(at_most=1 / 6))) == (
        "≤ 0.9", "≥ 1.8", "≤ 0.167",
    )  # fmt: skip


@pytest.mark.parametrize("limits", [{}, {"at_most": 1.0, "at_least": 0.5}])
def test_a_goal_has_one_limit(limits):
    with pytest.raises(ValueError, match="one limit"):
        Goal(**limits)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["value", "low", "baseline", "quantiles"])
def test_figures_are_finite(bad, place):
    fields = {"value": 1.0, "low": 1.0, "high": 1.0, place: {"p99": bad} if place == "quantiles" else bad}
    with pytest.raises(ValueError, match="finite"):
        Figure(part="p", name="n", unit="ms", samples=1, **fields)


def test_a_summary_and_its_distribution():
    values = [float(n) for n in range(1, 101)]
    figure = summary(
        "detection", "kill/1", values, "ms", quantiles=distribution(values), goal=Goal(at_most=60)
    )
    assert (figure.value, figure.low, figure.high, figure.samples) == (50.5, 25.75, 75.25, 100)
    assert figure.quantiles == pytest.approx({"p50": 50.5, "p90": 90.1, "p99": 99.01, "max": 100.0})
    assert figure.met is True
    assert summary("p", "n", [1.0], "s").met is None


@pytest.mark.parametrize(
    ("samples", "limit", "unsure"),
    [(99, 500.0, True), (100, 500.0, False), (100, 94.0, False), (100, 97.0, True), (100, 99.5, True)],
)
def test_a_99th_percentile_is_as_sure_as_its_tail(samples, limit, unsure):
    """The limit lies between the 95th percentile and the largest, or there are too few samples for one."""
    found = distribution([float(n) for n in range(1, 101)])
    figure = Figure(
        "p", "n", found["p99"], "ms", 95.05, 100.0, samples, goal=Goal(at_most=limit), quantiles=found
    )
    assert figure.unsure is unsure


def test_a_99th_percentile_is_shown_of_a_hundred_samples():
    many, few = ([float(n) for n in range(count)] for count in (100, 99))
    assert [*summary("p", "n", many, "ms", quantiles=distribution(many)).tail] == ["p99", "max"]
    assert [*summary("p", "n", few, "ms", quantiles=distribution(few)).tail] == ["max"]
    operations = {"p50": 1.0, "p99": 2.0, "max": 3.0}
    assert [*summary("p", "n", few, "ms", quantiles=operations).tail] == ["p99", "max"], "many of each sample"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
GOALS = st.none() | NUMBERS.map(lambda n: Goal(at_most=n)) | NUMBERS.map(lambda n: Goal(at_least=n))
FIGURES = st.builds(
    Figure,
    part=NAMES, name=NAMES, value=NUMBERS, unit=st.sampled_from(["ratio", "us", "GB/s"]), low=NUMBERS, high=NUMBERS,
    samples=st.integers(1, 10**6), goal=GOALS, note=st.text(max_size=9), baseline=st.none() | NUMBERS,
    absolute=st.none() | NUMBERS, absolute_unit=st.sampled_from(["", "us"]),
    quantiles=st.dictionaries(st.sampled_from(["p50", "p99", "max"]), NUMBERS),
    series=st.dictionaries(NAMES, JSON, max_size=3),
)  # fmt: skip


@given(FIGURES)
def test_json_gives_the_figure_back(figure):
    assert from_json(json.loads(json.dumps(to_json(figure), allow_nan=False))) == figure


@pytest.mark.parametrize(
    "data",
    [
        {"part": "p", "name": "n"},
        {
            "part": "p",
            "name": "n",
            "value": 1,
            "unit": "s",
            "low": 1,
            "high": 1,
            "samples": 1,
            "colour": "red",
        },
        {
            "part": "p",
            "name": "n",
            "value": 1,
            "unit": "s",
            "low": 1,
            "high": 1,
            "samples": 1,
            "goal": {"about": 2},
        },
    ],
)
def test_what_is_no_figure_is_refused(data):
    with pytest.raises(ValueError, match="not a figure"):
        from_json(data)
