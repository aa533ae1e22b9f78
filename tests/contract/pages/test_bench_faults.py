"""The parts worlds, detection, rebuild, elastic, growth and overheads of the benchmarks, in their smallest size."""

from __future__ import annotations

import argparse
import importlib

import pytest

from benchmarks.detection import part, session
from benchmarks.figures.figure import from_json, to_json
from benchmarks.measuring.part import Run

pytestmark = pytest.mark.everyday


def measured(name, *options):
    """The part's figures, by name; a remark says that something was not as it should be."""
    measures, parser, remarks = (
        importlib.import_module(f"benchmarks.{name}.part").PART,
        argparse.ArgumentParser(),
        [],
    )
    measures.add_options(parser)
    figures = list(measures.measure(Run(options=parser.parse_args(options), remark=remarks.append)))
    found = {figure.name: figure for figure in figures}
    assert remarks == []
    assert len(found) == len(figures)
    assert {figure.part for figure in figures} == {name}
    assert [from_json(to_json(figure)) for figure in figures] == figures
    return found


def test_worlds():
    found = measured(
        "worlds", "--counts", "1", "3", "--rounds", "1", "--idle", "0.1", "--plain", "2", "--pairs", "2"
    )
    assert 0 < found["pair/joined"].value < 10_000
    assert found["pair/used"].samples == 2
    assert found["join/3"].samples == 2, "those that were joined after the first"
    assert 0 < found["join/3"].value < 10_000
    for kind in ("threads", "descriptors"):
        assert 0 <= found[f"{kind}/3"].value <= found["plain/own_store+own_device/" + kind].value
    assert {"join_threads/3", "join_async/3", "close/3", "close_broken/3", "idle_cpu/3"} < found.keys()
    assert "idle_cpu/1" not in found
    assert found["join/3"].baseline == found["plain/shared_store+own_device/join"].value


def test_detection(monkeypatch):
    for each in (part, session):
        monkeypatch.setattr(each, "HANG", 4.0)  # a victim that stands still is no fault yet
    found = measured(
        "detection", "--counts", "2", "--kills", "5", "--stops", "1", "--whole", "0", "--at-once", "1"
    )
    assert [found[f"crash/2/{way}"].samples for way in ("recv", "aio", "told", "third")] == [2, 2, 1, 1]
    times = found["crash/2/p50"].series["ms"]
    assert times == sorted(times)
    assert len(times) == 5
    assert times[0] > 0
    assert found["crash/2/floor"].value > 0
    assert found["crash/2/p99"].value <= found["crash/2/p50"].quantiles["max"]
    assert -1000 < found["stop/2/p50"].value < 10_000, (
        "a sign of life is older than the stop, but not by much"
    )
    assert found["crash/at_once/2/aio/first"].value <= found["crash/at_once/2/aio/last"].value


def test_rebuild():
    kinds = ("left/on_break", "crash/join_all")
    found = measured("rebuild", "--rounds", "1", "--warm-up", "0", "--kinds", *kinds)
    assert [*found] == [*kinds]
    for figure in found.values():
        line = figure.series["timeline"]
        assert (
            0 < line["noticed"] <= line["active"] <= line["first"] == pytest.approx(figure.value, abs=0.001)
        )
        assert (figure.goal is not None) == figure.name.startswith("crash/")


def test_overheads():
    found = measured("overheads", "--rounds", "7", "--repeat", "200", "--imports", "0")
    assert found["with/world"].value > found["with/bare"].value > 0
    assert found["publish/10"].value > found["publish/0"].value > 0
    assert found["get_rank/world"].samples == 7
    log = found["operations_log/4B"]
    assert log.baseline > 0
    assert log.goal is not None
    assert found["join_and_close/10_subscribers"].value > 0


def test_elastic():
    kinds = ("4/file/reform", "4/tcp/reform", "4/file/shrink")
    found = measured("elastic", "--rounds", "1", "--warm-up", "0", "--kinds", *kinds)
    assert [*found] == [*kinds]
    for figure in found.values():
        line = figure.series["timeline"]
        assert (
            0 < line["noticed"] <= line["active"] <= line["first"] == pytest.approx(figure.value, abs=0.001)
        )
        assert figure.goal is not None


def test_growth():
    found = measured("growth", "--rounds", "1", "--warm-up", "0")
    assert [*found] == ["advance/idle", "grow/held", "leave/held", "replace/100MB", "step/ddp"]
    assert all(figure.value > 0 and figure.goal is not None for figure in found.values())
    for kind in ("grow/held", "leave/held"):
        assert found[kind].series["held"] <= found[kind].series["step"]
