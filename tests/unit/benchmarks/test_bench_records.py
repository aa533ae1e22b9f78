"""Records survive their file, and files that are none are named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import records
from benchmarks.figures.figure import Goal, from_json, ratio, summary, to_json
from benchmarks.figures.machine import describe, same_kind, words
from benchmarks.figures.records import BadRecord, PartRun, Record, dump, load, parse, save, stored

MACHINE = {"cpu": "X", "cores": 2, "memory_gb": 25.3, "kernel": "6.1", "python": "3.11.7", "torch": "2.13.0"}
SIMPLE = Record(
    "2026-11-22T04:21:45+00:00", "0.1.0", "abc+", MACHINE, ("--full",),
    {"latency": PartRun("full", 12.3, ("a remark",)), "peers": PartRun("full", missing="no network")},
    (
        ratio("latency", "a/4B", [1.0, 2.0], [2.0, 2.0], goal=Goal(at_most=0.9), series={"bytes": 4}),
        summary("latency", "b", [1 / 3, 2 / 3], "ms", quantiles={"p99": 0.5}, note="über"),
    ),
)  # fmt: skip


def shortened(value: float) -> float:
    return float(f"{value:.6g}")


def test_a_record_comes_back():
    back = parse(dump(SIMPLE))
    assert back.parts == SIMPLE.parts
    assert back.machine == SIMPLE.machine
    assert (back.when, back.commit, back.options) == (SIMPLE.when, SIMPLE.commit, SIMPLE.options)
    assert back.figures[0] == SIMPLE.figures[0]
    assert back.figures[1].low == shortened(SIMPLE.figures[1].low)
    assert dump(back) == dump(SIMPLE)


NUMBERS = st.floats(-1e12, 1e12)


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=5), max_size=4), st.text(max_size=8))
def test_any_figures_come_back_to_six_digits(rows, note):
    figures = tuple(
        summary("p", f"n{i}", row, "s", note=note, series={"all": row}) for i, row in enumerate(rows)
    )
    record = Record("2026-11-22T04:21:45+00:00", "1", "", {}, (), {"p": PartRun("quick")}, figures)
    back = parse(dump(record))
    assert dump(back) == dump(record)
    for before, after in zip(figures, back.figures, strict=True):
        assert after.value == shortened(before.value)
        assert after.series["all"] == [shortened(value) for value in before.series["all"]]
        assert (after.name, after.note, after.samples) == (before.name, before.note, before.samples)
        assert from_json(to_json(after)) == after


def test_each_figure_has_its_line():
    lines = dump(SIMPLE).splitlines()
    assert sum('"part": "latency"' in line for line in lines) == 2
    assert json.loads(dump(SIMPLE))["format"] == records.FORMAT


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a record"),
        ("[]", "not a record"),
        ("{}", "KeyError"),
        ('{"format": 99}', "not of format 1"),
        (dump(SIMPLE).replace('"samples": 2', '"samples": 2, "colour": 1'), "not a figure"),
        (dump(SIMPLE).replace('"seconds": 12.3', '"minutes": 1'), "not a record"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, text, why):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadRecord, match=why) as caught:
        load(path)
    assert str(path) in str(caught.value)
    good = save(SIMPLE, tmp_path)
    found, wrong = stored(tmp_path, tmp_path, tmp_path / "missing")
    assert [record.when for record in found] == [SIMPLE.when]
    assert len(wrong) == 1
    assert "x.json" in wrong[0]
    assert good.name == "2026-11-22-042145-latency-peers.json"


def test_the_records_that_are_kept_can_be_read():
    found, wrong = stored(records.KEPT)
    assert wrong == []
    assert any(record.of("toolchain") for record in found)


@pytest.mark.parametrize(
    ("other", "same"),
    [({}, True), ({"memory_gb": 24.0}, True), ({"memory_gb": 12.0}, False), ({"cores": 4}, False), ({"cpu": "Y"}, False),
     ({"kernel": "7", "torch": "3"}, True)],
)  # fmt: skip
def test_a_kind_of_machine(other, same):
    assert same_kind(MACHINE, {**MACHINE, **other}) is same
    assert same_kind({**MACHINE, **other}, MACHINE) is same


def test_a_machine_in_words():
    assert words(MACHINE) == "X, 2 cores, 25.3 GB, Linux 6.1, Python 3.11.7, torch 2.13.0"
    here = describe()
    assert here["cores"] >= 1
    assert here["memory_gb"] > 0
    assert same_kind(here, describe())
    assert words(here)
