"""The parts messages, collectives, secure, limits, thresholds, fanin and peers of the benchmarks, in their smallest size."""

from __future__ import annotations

import argparse
import importlib
import socket

import pytest

from benchmarks.collectives.part import OPS
from benchmarks.figures.figure import from_json, to_json
from benchmarks.limits import mpi
from benchmarks.measuring.part import Run, Unavailable
from benchmarks.measuring.ranks import Ranks
from benchmarks.messages.part import FORMS
from benchmarks.operations.operation import Operation

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


def test_messages():
    """Every form that a size has, right."""
    found, remarks = measured("messages", "--sizes", "4B", "1MB", "--rounds", "1")
    assert remarks == []
    for size, without in (
        ("4B", {"wire", "with_round"}),
        ("1MB", {"floor", "with", "with_round", "communicator"}),
    ):
        assert {f"send_recv/{size}/2/{form}" for form in {*FORMS} - without} <= found.keys()
    assert found["send_recv/4B/2/aio/p99"].value > 0
    assert found["send_recv/4B/2/world:floor"].baseline == found["send_recv/4B/2/floor"].absolute


def test_hosts():
    """Over a cable whose rate is bounded, no memory is read: a message takes what the rate allows."""
    try:
        found, remarks = measured("hosts", "--rates", "1Gbit", "--sizes", "4B", "4MB", "--rounds", "1")
    except Unavailable as error:
        pytest.skip(str(error))
    assert remarks == []
    for form in ("stock", "world", "aio"):
        assert {f"1Gbit/{op}/4B/2/{form}" for op in ("send_recv", "all_reduce")} <= found.keys()
    assert found["1Gbit/send_recv/4MB/2/world"].absolute > 20_000  # µs; 34 Mbit, less what goes at once


def test_secure():
    """Members over TLS and without it have met, and every figure is about both."""
    try:
        found, remarks = measured("secure", "--sizes", "4B", "1MB", "--rounds", "1")
    except Unavailable as error:
        pytest.skip(str(error))
    assert remarks == []
    joins = {f"join/{which}/{end}" for which in ("first", "later") for end in ("joined", "used")}
    lane = {"lane/send_recv/4B", "lane/send_recv/1MB", "lane/all_reduce/1MB"}
    assert {*found} == {*joins, *lane, "control/beat", "store/compare_set", "host/send_recv/16MB"}
    assert 0 < found["control/beat"].value < 1000
    for name in {*found} - {"control/beat"}:
        assert found[name].baseline > 0
        assert found[name].absolute > 0
    # A small message's time is mostly that in which the other process wakes.
    found, _ = measured("secure", "--kinds", "lane", "--sizes", "1MB", "--rounds", "15")
    assert found["lane/send_recv/1MB"].value < 1, "less of what is sealed goes through in a second"


def test_collectives():
    """Every operation, right in every form; three members, so that ranks differ."""
    found, remarks = measured(
        "collectives", "--ops", *OPS, "--sizes", "4B", "--rounds", "1", "--members", "3"
    )
    refused = {remark.partition(":")[0] for remark in remarks}
    assert not refused & {"barrier", "all_reduce", "broadcast", "all_gather"}, (
        "gloo does these on every torch"
    )
    for op in {*OPS} - refused:
        assert found[f"{op}/4B/3/stock"].value > 0
        assert found[f"{op}/4B/3/world"].baseline == found[f"{op}/4B/3/stock"].value
        assert f"{op}/4B/3/aio" in found
    assert "barrier/4B/3/with" in found


def test_checks_are_measured_where_there_are_any():
    found, remarks = measured(
        "collectives", "--ops", "all_reduce", "--sizes", "4B", "--rounds", "1", "--members", "2",
        "--forms", "world", "checked",
    )  # fmt: skip
    left_out = [remark for remark in remarks if "M8D_CHECK" in remark]
    assert ("all_reduce/4B/2/checked:world" in found) == (not left_out)


def test_thresholds(capsys):
    found, _ = measured(
        "thresholds", "--ops", "reduce", "--sizes", "4B", "1MB", "--rounds", "1", "--members", "2"
    )
    assert {*found} == {f"reduce/{size}/2/{form}" for size in ("4B", "1MB") for form in ("p2p", "lane")}
    assert "2:1MB" in capsys.readouterr().out


def test_limits():
    found, (remark,) = measured("limits", "--sizes", "1MB", "--rounds", "1")
    with_mpi = not mpi.missing()
    assert remark.startswith("MPI is left out" if not with_mpi else "MPI is ")
    for op in ("send_recv", "all_reduce"):
        assert {f"{op}/1MB/2/{form}" for form in ("stock", "world", "memcpy", "world:memcpy")} < found.keys()
        assert (f"{op}/1MB/2/mpi" in found) == with_mpi


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


@pytest.mark.parametrize("op", ["send_recv", *OPS])
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
