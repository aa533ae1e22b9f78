"""What the parts latency and fanin plan, and what they make of what was measured."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fanin import part as fanin
from benchmarks.figures.figure import Goal
from benchmarks.latency import part as latency
from benchmarks.latency.part import KB, MB, Case, goal_of
from benchmarks.measuring.part import Run
from benchmarks.measuring.timing import told

MANY = ("send_recv", "all_reduce")


def options(part, *given):
    parser = argparse.ArgumentParser()
    part.add_options(parser)
    return parser.parse_args(given)


def test_sizes_have_names():
    assert [latency.size_name(size) for size in (4, KB, 64 * KB, 16 * MB)] == ["4B", "1KB", "64KB", "16MB"]


@given(
    st.one_of(
        st.integers(1, 255).map(lambda n: 4 * n),
        st.integers(1, 1023).map(lambda n: KB * n),
        st.integers(1, 4096).map(lambda n: MB * n),
    )
)
def test_a_size_that_was_written_is_read(size):
    assert latency.parse_size(latency.size_name(size)) == size
    assert latency.parse_size(latency.size_name(size).lower().removesuffix("b")) == size


@pytest.mark.parametrize("text", ["", "3B", "0", "4X", "-4", "B", "KB"])
def test_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="multiple of 4"):
        latency.parse_size(text)


def test_the_goals_are_those_that_were_set():
    for op in MANY:
        assert goal_of(op, 4, 2, "world") == Goal(at_most=0.90)
        assert {goal_of(op, size, 2, "world") for size in (64 * KB, MB, 16 * MB, 64 * MB)} == {
            Goal(at_most=1.01)
        }
        assert (goal_of(op, 4, 2, "with"), goal_of(op, MB, 2, "with")) == (
            Goal(at_most=1.04),
            Goal(at_most=1.01),
        )
        assert goal_of(op, 4, 4, "world") is None
        assert goal_of(op, 4, 2, "pg") is None
    assert goal_of("send_recv", 4, 2, "aio") == Goal(at_most=1.8)
    assert {goal_of("send_recv", size, 2, "aio") for size in (MB, 64 * MB)} == {Goal(at_most=1.02)}
    assert goal_of("send_recv", 64 * KB, 2, "aio") is None
    assert goal_of("broadcast", 4, 2, "world") is None


@pytest.mark.parametrize("full", [False, True])
def test_every_goal_is_measured(full):
    run = Run(full=full, options=options(latency.PART))
    cases = latency.cases_of(run, 2)
    assert {case.op for case in cases} == {*latency.MAIN, *latency.OTHERS}
    assert len({case.name for case in cases}) == len(cases)
    aimed = {
        (case.op, case.size, form)
        for case in cases
        for form in case.forms
        if goal_of(case.op, case.size, case.members, form) is not None
    }
    largest = 64 * MB if full else 16 * MB
    for op in MANY:
        wanted = {
            (op, 4, "world"),
            (op, 64 * KB, "world"),
            (op, largest, "world"),
            (op, 4, "with"),
            (op, MB, "with"),
        }
        assert wanted <= aimed
    assert {("send_recv", 4, "aio"), ("send_recv", MB, "aio"), ("send_recv", largest, "aio")} <= aimed
    for case in cases:
        assert case.forms[0] == "stock"
        assert len(set(case.forms)) == len(case.forms)
    assert [case.size for case in cases if case.op == "barrier"] == [4], "a barrier has no size"


def test_options_choose():
    chosen = options(latency.PART, "--ops", "reduce", "--sizes", "64KB", "--forms", "world", "--rounds", "3")
    (case,) = latency.cases_of(Run(options=chosen), 4)
    assert (case.name, case.forms, case.rounds) == ("reduce/64KB/4", ("stock", "world"), 3)


def test_figures_of_a_case():
    case = Case("send_recv", 4, 2, ("stock", "world", "aio"), rounds=3, repeat=10, warm_up=1)
    rounds = {"stock": [50.0, 60.0, 100.0], "world": [40.0, 57.0, 90.0], "aio": [100.0, 90.0, 180.0]}
    chunks = {form: [{"p50": 50.0, "p99": 99.0, "max": 900.0, "mean": 60.0}] for form in case.forms}
    tails = {
        "stock": [{"p50": 50.0, "p99": 100.0, "max": 700.0}],
        "aio": [{"p50": 90.0, "p99": 250.0, "max": 800.0}],
    }
    found = {each.name: each for each in latency.figures_of(case, rounds, chunks, tails)}
    stock = found["send_recv/4B/2/stock"]
    assert (stock.value, stock.quantiles) == (60.0, {"p50": 60.0, "p99": 100.0, "max": 700.0})
    world = found["send_recv/4B/2/world"]
    assert (world.value, world.absolute, world.baseline, world.met) == (0.9, 57.0, 60.0, True)
    assert found["send_recv/4B/2/aio"].met is True
    assert (found["send_recv/4B/2/aio/p99"].value, found["send_recv/4B/2/aio/p99"].met) == (2.5, True)
    assert found["send_recv/4B/2/aio/p99_to_median"].value == 5.0
    assert "send_recv/4B/2/world/p99" not in found
    assert found["send_recv/4B/2/stock_long"].value == found["send_recv/4B/2/aio"].baseline == 50.0
    assert world.series["gb_per_s"] == pytest.approx([1e-4, 4 / 57e3, 4 / 90e3], rel=1e-3)


def test_what_is_told_of_timings():
    assert told([2000, 4000, 6000], share=0.5) == {
        "p50": 2.0,
        "p99": pytest.approx(2.98),
        "max": 3.0,
        "mean": 2.0,
    }


def test_fairness_by_hand():
    assert fanin.jain([5, 5, 5, 5]) == 1
    assert fanin.jain([8, 0, 0, 0]) == 0.25
    assert fanin.jain([1, 2, 3]) == pytest.approx(36 / 42)
    with pytest.raises(ValueError, match="nothing"):
        fanin.jain([0, 0])


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=32).filter(any))
def test_fairness_has_bounds(counts):
    assert 1 / len(counts) <= fanin.jain(counts) * (1 + 1e-9)
    assert fanin.jain(counts) <= 1 + 1e-9


def test_fanin_compares_the_best_with_the_best():
    rates = {
        "stock_irecv": [1000.0, 1200.0], "stock_threads": [900.0, 800.0], "irecv": [990.0, 1188.0],
        "threads": [400.0, 400.0], "aio": [10.0, 5000.0], "communicator": [300.0, 300.0],
    }  # fmt: skip
    found = {each.name: each for each in fanin.figures_of(16, MB, rates)}
    # The highest median of all is that of `aio`, which stock has nothing like.
    assert found["16/1MB/best"].series["of"] == "irecv", "the highest median of the ways that stock has, too"
    assert found["16/1MB/irecv"].value == pytest.approx(0.99)
    assert found["16/1MB/irecv"].baseline == pytest.approx(1100 * MB / 1e9)
    assert found["16/1MB/best"].goal == Goal(at_least=0.97)
    small = {each.name: each for each in fanin.figures_of(16, 4, rates)}
    assert (small["16/4B/best"].goal, small["16/4B/stock_irecv"].unit) == (None, "1/s")
    few = {each.name: each for each in fanin.figures_of(4, MB, rates)}
    assert few["4/1MB/best"].goal is None
