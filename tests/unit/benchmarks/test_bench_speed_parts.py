"""What messages, collectives, fanin and the parts beside them plan, and what they make of what was measured."""

from __future__ import annotations

import argparse
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.collectives import part as collectives
from benchmarks.fanin import part as fanin
from benchmarks.figures import sizes
from benchmarks.figures.compare import Verdict, change
from benchmarks.figures.figure import Goal, summary
from benchmarks.figures.goals import answers
from benchmarks.figures.sizes import KB, MB
from benchmarks.hosts import part as hosts
from benchmarks.limits import mpi
from benchmarks.limits import part as limits
from benchmarks.measuring.part import Run
from benchmarks.measuring.timing import told
from benchmarks.messages import part as messages
from benchmarks.operations.cases import BESIDE, WORDS, Case, figures_of
from benchmarks.secure import part as secure
from benchmarks.secure.certificates import certificates
from benchmarks.thresholds import part as thresholds
from benchmarks.thresholds.table import table_of, thresholds_of, words_of


def options(part, *given):
    parser = argparse.ArgumentParser()
    part.add_options(parser)
    return parser.parse_args(given)


def test_sizes_have_names():
    assert [sizes.size_name(size) for size in (4, KB, 64 * KB, 16 * MB)] == ["4B", "1KB", "64KB", "16MB"]


@given(
    st.one_of(
        st.integers(1, 255).map(lambda n: 4 * n),
        st.integers(1, 1023).map(lambda n: KB * n),
        st.integers(1, 4096).map(lambda n: MB * n),
    )
)
def test_a_size_that_was_written_is_read(size):
    assert sizes.parse_size(sizes.size_name(size)) == size
    assert sizes.parse_size(sizes.size_name(size).lower().removesuffix("b")) == size


@pytest.mark.parametrize("text", ["", "3B", "0", "4X", "-4", "B", "KB"])
def test_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="multiple of 4"):
        sizes.parse_size(text)


def message(size, form):
    goal = messages.goal_of(Case("messages", "send_recv", size, 2, ("stock",), 1, 1, 1), form)
    return goal and goal.limit


def collective(op, size, form, members=2):
    goal = collectives.goal_of(Case("collectives", op, size, members, ("stock",), 1, 1, 1), form)
    return goal and goal.limit


def test_the_goals_of_messages_are_those_that_were_set():
    assert [message(size, "world") for size in (4, KB, 64 * KB)] == [0.68, None, 0.58]
    assert [message(size, "world:floor") for size in (4, KB, 64 * KB)] == [1.15, None, 1.15]
    for size in (MB, 4 * MB, 16 * MB):
        assert [message(size, form) for form in ("world", "wire", "aio")] == [0.42, 0.95, 0.48]
    assert [message(4, form) for form in ("with", "aio", "aio/p99")] == [0.80, 0.90, 1.2]
    assert [message(64 * MB, form) for form in ("world", "wire", "aio", "with")] == [None, None, 0.48, None]


@pytest.mark.parametrize("members", [2, 4])
def test_the_goals_of_collectives_are_those_that_were_set(members):
    for op in ("barrier", "all_reduce", "broadcast"):
        for form in ("world", "with"):
            assert [collective(op, size, form, members) for size in (4, 64 * KB, MB)] == [0.40, 0.40, None]
        assert collective(op, 4, "aio", members) is None
    for op in ("all_reduce", "all_gather"):
        found = [collective(op, size, "world", members) for size in (MB, 4 * MB, 16 * MB, 64 * MB)]
        assert found == [None, 0.60, 0.60, 0.60]
    assert collective("reduce", 4, "world", members) is None


@pytest.mark.parametrize("full", [False, True])
def test_between_hosts_a_world_is_to_be_as_fast_as_stock(full):
    run = Run(full=full, options=options(hosts.PART))
    cases = [case for rate in hosts.RATES for case in hosts.cases_of(run, rate)]
    assert len({case.name for case in cases}) == len(cases)
    assert {case.size for case in cases if case.op == "all_reduce"} <= {4, 64 * KB, 256 * KB}
    for case in cases:
        assert [hosts.goal_of(case, form) for form in ("world", "aio")] == [Goal(at_most=1.0), None]
    told = [summary("hosts", f"{case.name}/world", [0.5], "", goal=Goal(at_most=1.0)) for case in cases]
    assert [len(taken) for target, taken in answers(told) if "namespaces" in target.what] == [len(cases)]


def test_what_secure_mode_adds_is_a_difference_of_each_round():
    goal = Goal(at_most=5.0)
    figure = secure.added("join/later/used", "ms", [(9.0, 12.0), (30.0, 34.0), (10.0, 12.0)], "a join", goal)
    assert (figure.low, figure.value, figure.high) == (2.5, 3.0, 3.5)
    assert (figure.baseline, figure.absolute, figure.met) == (10.0, 12.0, True)


def test_secure_modes_messages_are_compared_by_time_and_from_1_mb_on_by_throughput():
    small = secure.carried("lane/send_recv/4B", 4, [20.0, 25.0], [40.0, 50.0], "a message")
    assert (small.value, small.absolute_unit, small.goal) == (2.0, "us", None)
    large = secure.carried("lane/send_recv/1MB", MB, [MB / 2e3] * 2, [MB / 1e3] * 2, "a message")
    assert (large.value, large.baseline, large.absolute_unit) == (0.5, 2.0, "GB/s")
    assert large.goal == Goal(at_least=0.5)
    assert large.met


def test_every_goal_of_secure_mode_has_its_line():
    told = [
        summary("secure", name, [1.0], "", goal=Goal(at_most=1.0))
        for name in ("join/first/used", "control/beat", "lane/all_reduce/1MB", "host/send_recv/16MB")
    ]
    assert [len(taken) for target, taken in answers(told) if target.what.startswith("secure")] == [1, 1, 2]


def test_certificates_are_there_while_they_are_used():
    pytest.importorskip("cryptography")
    with certificates() as environment:
        paths = [Path(each) for each in environment.values()]
        assert {*environment} == {"M8D_TLS_CERT", "M8D_TLS_KEY", "M8D_TLS_CA"}
        assert {stat.S_IMODE(each.stat().st_mode) for each in paths} == {0o600}
    assert not any(each.exists() for each in paths)


def test_the_goals_of_fanin_are_those_that_were_set():
    found = [fanin.goal_of(16, size, "aio") for size in (4, 4 * KB, MB, 4 * MB)]
    assert found == [Goal(at_least=1.4)] * 2 + [Goal(at_least=2.0)] * 2
    assert fanin.goal_of(16, 4, "irecv") is fanin.goal_of(4, 4, "aio") is None
    assert fanin.fairness_goal_of(16, "aio") == Goal(at_least=0.995)
    assert fanin.fairness_goal_of(16, "threads") is fanin.fairness_goal_of(4, "aio") is None


def planned(full):
    run = Run(full=full, options=options(messages.PART))
    found = [(messages.goal_of, messages.cases_of(run))]
    run = Run(full=full, options=options(collectives.PART))
    return [*found, *((collectives.goal_of, collectives.cases_of(run, members)) for members in (2, 4))]


@pytest.mark.parametrize("full", [False, True])
def test_every_goal_is_measured_and_has_its_line(full):
    aimed = []
    for goal_of, cases in planned(full):
        assert len({case.name for case in cases}) == len(cases)
        for case in cases:
            assert case.base == "stock"
            assert len(set(case.forms)) == len(case.forms)
            both = [":".join(pair) for pair in BESIDE if {*pair} <= {*case.forms}]
            for form in (*case.forms[1:], "aio/p99", *both):
                goal = goal_of(case, form)
                if goal is not None:
                    aimed.append(summary(case.part, f"{case.name}/{form}", [1.0], "ratio", goal=goal))
    names = {figure.name for figure in aimed}
    wanted = {
        *(f"send_recv/{size}/2/{form}" for size in ("4B", "64KB") for form in ("world", "world:floor")),
        *(f"send_recv/4B/2/{form}" for form in ("with", "aio", "aio/p99")),
        *(
            f"send_recv/{size}/2/{form}"
            for size in ("1MB", "4MB", "16MB")
            for form in ("world", "wire", "aio")
        ),
        *(
            f"{op}/64KB/{n}/{form}"
            for op in ("all_reduce", "broadcast")
            for n in (2, 4)
            for form in ("world", "with")
        ),
        *(f"barrier/4B/{n}/{form}" for n in (2, 4) for form in ("world", "with")),
        *(f"{op}/4MB/{n}/world" for op in ("all_reduce", "all_gather") for n in (2, 4)),
    }
    assert wanted <= names
    if full:
        assert {f"{op}/64MB/{n}/world" for op in ("all_reduce", "all_gather") for n in (2, 4)} <= names
    for target, found in answers(aimed):
        for figure in found:
            limit = re.search(r"[≤≥] ([\d.]+)", target.limit)
            assert limit, target
            assert float(limit[1]) == figure.goal.limit, (target, figure.key)


def test_a_barrier_has_no_size():
    run = Run(full=True, options=options(collectives.PART))
    assert [case.size for case in collectives.cases_of(run, 2) if case.op == "barrier"] == [4]


def test_checks_are_measured_where_they_cost_most_and_least():
    run = Run(options=options(collectives.PART, "--sizes", "4B", "64KB", "1MB"))
    checked = [each.name for n in (2, 4) for each in collectives.cases_of(run, n) if "checked" in each.forms]
    assert checked == ["all_reduce/4B/2", "all_reduce/1MB/2"]


def test_options_choose():
    chosen = options(
        collectives.PART, "--ops", "reduce", "--sizes", "64KB", "--forms", "world", "--rounds", "3"
    )
    (case,) = collectives.cases_of(Run(options=chosen), 4)
    assert (case.name, case.forms, case.rounds) == ("reduce/64KB/4", ("stock", "world"), 3)
    (case,) = messages.cases_of(Run(options=options(messages.PART, "--sizes", "4MB", "--forms", "wire")))
    assert (case.name, case.forms) == ("send_recv/4MB/2", ("stock", "wire"))


def test_every_form_is_told_in_words():
    for part in (messages, collectives, limits):
        assert {*part.FORMS} <= WORDS.keys()
    assert {form for pair in BESIDE for form in pair} <= WORDS.keys()


def test_figures_of_a_case():
    case = Case(
        "messages", "send_recv", 4, 2, ("stock", "floor", "world", "aio"), rounds=3, repeat=10, warm_up=1
    )
    rounds = {
        "stock": [50.0, 60.0, 100.0], "floor": [20.0, 38.0, 50.0], "world": [30.0, 38.0, 60.0],
        "aio": [100.0, 90.0, 180.0],
    }  # fmt: skip
    chunks = {form: [{"p50": 50.0, "p99": 99.0, "max": 900.0, "mean": 60.0}] for form in case.forms}
    tails = {
        "stock": [{"p50": 50.0, "p99": 100.0, "max": 700.0}],
        "aio": [{"p50": 40.0, "p99": 250.0, "max": 800.0}],
    }
    found = {each.name: each for each in figures_of(case, rounds, chunks, tails, messages.goal_of)}
    stock = found["send_recv/4B/2/stock"]
    assert (stock.value, stock.quantiles) == (60.0, {"p50": 60.0, "p99": 100.0, "max": 700.0})
    world = found["send_recv/4B/2/world"]
    assert (world.value, world.absolute, world.baseline, world.met) == (0.6, 38.0, 60.0, True)
    beside = found["send_recv/4B/2/world:floor"]
    assert (beside.value, beside.baseline, beside.met) == (1.2, 38.0, False)
    assert found["send_recv/4B/2/aio"].met is True
    assert (found["send_recv/4B/2/aio/p99"].value, found["send_recv/4B/2/aio/p99"].met) == (2.5, False)
    assert "send_recv/4B/2/world/p99" not in found
    assert found["send_recv/4B/2/stock_long"].value == found["send_recv/4B/2/aio"].baseline == 50.0
    assert world.series["gb_per_s"] == pytest.approx([4 / 30e3, 4 / 38e3, 4 / 60e3], rel=1e-3)


def test_the_first_form_is_what_others_are_compared_with():
    case = Case("thresholds", "reduce", 4, 2, ("p2p", "lane"), rounds=1, repeat=1, warm_up=1)
    chunks = {form: [{"p50": 1.0, "p99": 1.0, "max": 1.0}] for form in case.forms}
    rounds = {"p2p": [10.0], "lane": [4.0]}
    found = [*figures_of(case, rounds, chunks, {}, lambda _case, _form: None)]
    assert [(each.name, each.value) for each in found] == [
        ("reduce/4B/2/p2p", 10.0),
        ("reduce/4B/2/lane", 0.4),
    ]


RATIOS = {
    ("reduce", 4, 2): 0.2, ("reduce", 64 * KB, 2): 1.1, ("reduce", MB, 2): 0.8, ("reduce", 16 * MB, 2): 1.3,
    ("gather", 4, 2): 2.0, ("gather", 64 * KB, 2): 0.9, ("reduce", 4, 8): 0.5,
}  # fmt: skip


def test_thresholds_are_where_the_whole_is_fastest():
    assert thresholds_of(RATIOS) == {("reduce", 2): MB, ("gather", 2): None, ("reduce", 8): 4}
    assert "reduce, 2 members: the lane up to 1MB" in words_of(RATIOS)
    assert "gather, 2 members: the lane at no size" in words_of(RATIOS)


def test_the_table_of_thresholds():
    head, columns, reduce, gather = table_of(RATIOS).splitlines()
    assert columns.split() == [f"{n}:{size}" for n in (2, 8) for size in ("4B", "64KB", "1MB", "16MB")]
    assert reduce.split() == ["reduce", "0.20", "1.10*", "0.80", "1.30*", "0.50"]
    assert gather.split() == ["gather", "2.00*", "0.90"]
    assert "*" in head


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([4, KB, MB]), st.sampled_from([2, 4])),
        st.floats(0.01, 100),
        min_size=1,
    )
)
def test_a_threshold_is_one_of_the_sizes(ratios):
    for (op, members), size in thresholds_of(ratios).items():
        assert size is None or (op, size, members) in ratios
    assert len({len(line) for line in table_of(ratios).splitlines()[1:]}) == 1


def test_all_is_planned_for_thresholds():
    run = Run(options=options(thresholds.PART))
    for members in thresholds.MEMBERS:
        cases = thresholds.cases_of(run, members)
        assert len(cases) == len({case.name for case in cases}) == 8 * 4
        assert {case.forms for case in cases} == {("p2p", "lane")}


def test_limits_without_mpi(monkeypatch):
    run = Run(options=options(limits.PART))
    assert all("mpi" in case.forms for case in limits.cases_of(run, mpi=True))
    assert not any("mpi" in case.forms for case in limits.cases_of(run, mpi=False))
    monkeypatch.setenv("PATH", "")
    assert "openmpi-bin" in mpi.missing()


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


def test_more_fairness_is_better():
    before, after = (
        {each.name: each for each in fanin.fairness_of(4, 4 * KB, "threads", [counts] * 8)}
        for counts in ([100, 90, 90, 20], [100, 90, 90, 80])
    )
    assert {*before} == {f"fairness/4/4KB/threads/{kind}" for kind in ("jain", "least_to_most")}
    found = [change(before[name], after[name]) for name in before]
    assert [each.verdict for each in found] == [Verdict.BETTER, Verdict.BETTER]


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
    assert (found["16/1MB/best"].goal, found["16/1MB/aio"].goal) == (None, Goal(at_least=2.0))
    small = {each.name: each for each in fanin.figures_of(16, 4, rates)}
    assert (small["16/4B/aio"].goal, small["16/4B/stock_irecv"].unit) == (Goal(at_least=1.4), "1/s")
    few = {each.name: each for each in fanin.figures_of(4, MB, rates)}
    assert few["4/1MB/aio"].goal is None
