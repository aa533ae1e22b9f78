"""All of `nox -s gpu`, with the test bed in the place of hardware and its controls hidden from the programs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from bed.defects import PREMUL, premul_of_bfloat16
from hardware import risks
from hardware.__main__ import main
from hardware.costs import COSTS
from hardware.machine import NoGpu, look
from hardware.paper import PAPER
from hardware.records import read
from hardware.selection import CHECKS
from matrix.outcome import ALIVE

FEW = ["--only", "lost.all_reduce.wait", "again.rebuilt", "--modes", "aeh2", "--repeat", "1"]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def run(python, library, pytestconfig):
    packages = tuple(map(Path, pytestconfig.getoption("--bed-path")))
    return partial(_run, python, library, packages)


def _run(python, library, packages, docs, *args):
    code = main(
        ["--gpu", f"a-build={python}", "--docs", str(docs), *args], stand_in=library, packages=packages
    )
    return code, read(docs / "hardware.json", today="")


def test_one_gpu(run, tmp_path, monkeypatch):
    monkeypatch.setenv("M8D_BED_DEVICES", "1")
    code, records = run(tmp_path, "--checks", *FEW)
    assert code == 0
    assert {each.column.placement for each in records.runs} == {"one-gpu"}
    for each in records.runs:
        assert each.column.gpu.startswith("m8d test bed")
        assert each.column.nccl.startswith("2.")
        assert each.lacking == ()
        assert each.left_out == ("--only lost.all_reduce.wait again.rebuilt", "--modes aeh2", "--checks")
        assert each.column.sources
        assert {(row.scenario, row.observer.end) for row in each.rows} == {
            ("lost.all_reduce.wait", ALIVE), ("again.rebuilt", ALIVE),
        }  # fmt: skip
        assert not any(row.failure for row in each.rows)
    page = (tmp_path / "hardware.md").read_text()
    assert "m8d test bed (no hardware)" in page
    assert "Nothing was run yet" not in page


def test_values_and_worlds(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("M8D_BED_DEVICES", "1")
    code, records = run(tmp_path, "--only", "none", "--backends", "nccl")
    assert code == 0, capsys.readouterr().out
    (only,) = records.runs
    values = [check for check in only.checks if check.name in CHECKS]
    assert [check.name for check in values] == [*CHECKS]
    known = risks.names(patched=bool(only.column.topics))
    assert len(only.checks) == len(CHECKS) + len(COSTS) + 1 + len(known) - 2  # which need a GPU that computes
    assert {check.outcome for check in only.checks} == {"right"}
    known = {defect.rpartition(": ")[2] for check in only.checks for defect in check.defects}
    assert known == ({PREMUL} if premul_of_bfloat16(only.column.torch) else set())
    assert all(check.done for check in only.checks)
    assert sum(bool(check.ms) for check in values) == 2  # killed, stopped
    assert all(check.figures for check in only.checks if check.name in {*COSTS, PAPER})


def test_two_gpus_are_too_few_for_three_ranks_of_one_gpu_each(run, tmp_path, monkeypatch):
    monkeypatch.setenv("M8D_BED_DEVICES", "2")
    code, records = run(tmp_path, "--checks", "--backends", "nccl", *FEW)
    assert code == 0
    found = {each.column.placement: each for each in records.runs}
    assert list(found) == ["gpus-sockets", "gpus", "one-gpu"]
    assert found["gpus"].lacking == found["gpus-sockets"].lacking == ("again.rebuilt: 3 ranks",)
    assert {row.scenario for row in found["gpus"].rows} == {"lost.all_reduce.wait"}
    assert {row.scenario for row in found["one-gpu"].rows} == {"lost.all_reduce.wait", "again.rebuilt"}


def test_what_was_run_is_kept_when_ranks_never_get_to_their_fault(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("M8D_BED_DEVICES", "1")
    monkeypatch.setattr("hardware.session.IN_VAIN", 2)
    monkeypatch.setattr("matrix.runner.START", 0.001)
    code, records = run(tmp_path, "--checks", "--backends", "nccl", "--jobs", "1",
                        "--only", "lost.*", "--modes", "aeh2", "--repeat", "1")  # fmt: skip
    assert code == 3
    assert "2 runs in a row came to nothing" in capsys.readouterr().out
    assert [bool(row.failure) for each in records.runs for row in each.rows] == [True, True]


def test_the_test_bed_is_not_taken_for_hardware(python, library, tmp_path, monkeypatch):
    monkeypatch.setattr("hardware.machine.STAND_IN", "m8d")
    assert look(python, library=library).gpus
    answer = json.dumps({"found": True, "torch": "2", "cuda": "13", "gpus": ["m8d test bed"], "why": ""})
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho 'm8d-machine:{answer}'\n")
    script.chmod(0o755)
    with pytest.raises(NoGpu, match="not hardware's"):
        look(script)
