"""Processes that benchmarks fork to kill them: they tell, fail, end, and never come back as a second parent."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.measuring.ranks import Ranks

KITS = Path(__file__).parents[2] / "kits"


@pytest.fixture
def parent():
    with Ranks("benchfork:make", 1, env={"PYTHONPATH": str(KITS)}, start_timeout=30) as (rank,):
        yield rank


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True  # only not reaped yet
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def hear(parent, within: float = 20):
    return parent.call("hear", within=within)


def test_it_tells_and_is_killed(parent):
    pid = parent.call("start", what="talk")
    assert hear(parent) == {"pid": pid, "text": "one\ntwo"}
    assert hear(parent) == {"more": [1, 2]}
    before, at, after = parent.call("kill")
    assert before <= at <= after
    assert ends(pid)


def test_it_is_stopped_and_killed(parent):
    pid = parent.call("start", what="talk")
    assert hear(parent)["pid"] == pid
    assert parent.call("stop") == "stopped"
    parent.call("kill")
    assert ends(pid)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fail", "LookupError: on purpose"),
        ("return", "SystemExit"),
        ("end", "ended before it told anything more"),
    ],
)
def test_it_fails_or_ends(parent, what, said):
    """And only the parent answers on: a child that came back into its program would answer too."""
    parent.call("start", what=what)
    assert said in hear(parent)["failed"]
    parent.call("kill")
    pid = parent.call("start", what="talk")
    assert hear(parent)["pid"] == pid


def test_it_is_silent(parent):
    parent.call("start", what="silent")
    assert "told nothing within 0.05 s" in hear(parent, 0.05)["failed"]


def test_it_ends_with_its_parent():
    with Ranks("benchfork:make", 1, env={"PYTHONPATH": str(KITS)}, start_timeout=30) as (rank,):
        pid = rank.call("start", what="silent")
        os.kill(rank.pid, 9)
        assert ends(pid)
