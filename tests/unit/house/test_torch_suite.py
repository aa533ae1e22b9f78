"""How the comparison of PyTorch's own suite decides (tests/torchsuite)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
from torchsuite import __main__ as program
from torchsuite.compare import Difference, compare, counted


def test_the_same_ends_are_no_difference() -> None:
    ended = {"a": ("passed", ""), "b": ("skipped", "no GPU"), "c": ("failed", "here\nand there")}
    assert compare(ended, {**ended, "c": ("failed", "otherwise")}) == []


def test_another_end_is_a_difference_and_so_is_none() -> None:
    stock = {"a": ("passed", ""), "b": ("passed", ""), "c": ("failed", "x")}
    world = {"a": ("failed", "Traceback\nValueError: no\n"), "c": ("passed", ""), "d": ("skipped", "")}
    assert compare(stock, world) == [
        Difference("a", "passed", "failed", "ValueError: no"),
        Difference("b", "passed", "not run", ""),
        Difference("c", "failed", "passed", ""),
        Difference("d", "not run", "skipped", ""),
    ]


def test_ends_are_counted() -> None:
    assert counted({"a": ("passed", ""), "b": ("passed", ""), "c": ("failed", "x")}) == {
        "passed": 2,
        "skipped": 0,
        "failed": 1,
    }


def test_where_the_suite_cannot_start_it_says_that_nothing_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchsuite", "--sizes", "2"])
    monkeypatch.setenv("PYTHONPATH", "")  # where its processes look for it
    monkeypatch.chdir(tmp_path)
    assert program.main() == 2
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": nothing ran: ")[0] for line in said] == ["2 ranks, stock", "2 ranks, world"]
    assert all("torchsuite" in line.partition(": nothing ran: ")[2] for line in said), said
