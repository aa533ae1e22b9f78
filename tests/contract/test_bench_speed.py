"""The parts latency, fanin and peers of the benchmarks, in their smallest size."""

from __future__ import annotations

import argparse
import importlib
import socket

import pytest

from benchmarks.figures.figure import from_json, to_json
from benchmarks.latency.operations import COMMUNICATED, PLAIN, Operation
from benchmarks.latency.part import FORMS, MAIN, OTHERS
from benchmarks.measuring.part import Run, Unavailable
from benchmarks.measuring.ranks import Ranks

pytestmark = pytest.mark.everyday


def options(name, *given):
    part, parser = importlib.import_module(f"benchmarks.{name}.part").PART, argparse.ArgumentParser()
    part.add_options(parser)
    return part, parser.parse_args(given)


def measured(name, *given):
    """The part's figures, by name."""
    part, parsed = options(name, *given)
    remarks = []
    figures = list(part.measure(Run(options=parsed, remark=remarks.append)))
    found = {figure.name: figure for figure in figures}
    assert len(found) == len(figures)
    assert {figure.part for figure in figures} == {name}
    assert [from_json(to_json(figure)) for figure in figures] == figures
    return found, remarks


def test_latency():
    """Every operation, right in every form that the quick run has; three members, so that ranks differ."""
    found, remarks = measured("latency", "--sizes", "4B", "--rounds", "1", "--members", "3")
    refused = {remark.partition(":")[0] for remark in remarks}
    assert not refused & set(MAIN), "gloo does these on every torch"
    for op in {*MAIN, *OTHERS} - refused:
        assert found[f"{op}/4B/3/stock"].value > 0
        assert found[f"{op}/4B/3/world"].baseline == found[f"{op}/4B/3/stock"].value
    for op in MAIN:
        assert {f"{op}/4B/3/{form}" for form in FORMS} < found.keys()


def test_fanin():
    found, remarks = measured(
        "fanin", "--workers", "1", "2", "--sizes", "4KB", "--rounds", "1", "--fair", "0.02"
    )
    assert remarks == []
    assert found["2/4KB/stock_irecv"].value > 0
    assert found["2/4KB/best"].value >= max(found[f"2/4KB/{form}"].value for form in ("irecv", "threads"))
    for form in ("stock_threads", "irecv", "aio", "communicator"):
        counts = found[f"fairness/2/4KB/{form}/jain"].series["messages"]
        assert all(len(each) == 2 for each in counts)
        assert 0.5 <= found[f"fairness/2/4KB/{form}/jain"].value <= 1


def test_the_program_for_pymultiworld_runs_on_this_package():
    with Ranks("benchmarks.peers.rank:make", 2, args={"backend": "gloo"}) as ranks, socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        assert all(ms > 0 for ms in ranks.call("create", world="one", port=held.getsockname()[1]))
        for face in ("communicator", "aio"):
            told = ranks.call("round_trips", world="one", face=face, size=64, repeat=3, warm_up=1)[0]
            assert 0 < told["p50"] <= told["max"]
            assert ranks.call("stream", world="one", face=face, size=4096, messages=2)[1] > 0


def test_peers_makes_nothing_in_a_quick_run(tmp_path, monkeypatch):
    monkeypatch.setenv("M8D_CACHE", str(tmp_path))
    part, parsed = options("peers")
    with pytest.raises(Unavailable, match="--full"):
        list(part.measure(Run(options=parsed)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("op", [*MAIN, *OTHERS])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_operation_that_did_nothing_is_noticed(op, rank):
    operation = Operation(op, 8, rank, 2)
    operation.begin_check()
    # Who sends to others has nothing to receive, and rank 0 has what it sends to itself.
    seen = op != "barrier" and (rank == 1 or op not in {"send_recv", "broadcast"})
    if op in {"gather", "reduce"}:
        seen = rank == 0
    if seen:
        with pytest.raises(AssertionError, match=op):
            operation.end_check()
    else:
        operation.end_check()


def test_both_lists_of_operations_agree():
    from benchmarks.latency import part as latency

    assert latency._COMMUNICATED == COMMUNICATED
    assert latency._PLAIN - {"send_recv"} == PLAIN.keys()
