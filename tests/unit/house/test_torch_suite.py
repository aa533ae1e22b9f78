"""How the comparison of PyTorch's own suite decides (tests/torchsuite)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
