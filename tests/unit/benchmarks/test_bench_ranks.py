"""The processes that benchmarks measure in: real ones, without torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.measuring.ranks import END_SECONDS, RankError, Ranks, RankTimeout

KITS = Path(__file__).parents[2] / "kits"


def ranks(count: int = 2, **args) -> Ranks:
    return Ranks("benchrank:make", count, args=args, env={"PYTHONPATH": str(KITS)}, start_timeout=30)


def gone(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped by whoever started it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ends(*pids: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not all(gone(pid) for pid in pids):
        time.sleep(0.01)
    return all(gone(pid) for pid in pids)


def test_commands_and_answers():
    with ranks(3, colour="red") as each:
        assert each.call("told") == [[rank, 3, {"colour": "red"}] for rank in range(3)]
        assert each[1].call("add", one=1, other=0.5) == 1.5
        each[0].start("add", one=1, other=2)
        each[2].start("add", one=3, other=4)
        assert (each[2].result(), each[0].result()) == (7, 3)
        assert [rank.number for rank in each] == [0, 1, 2]
        pids = [rank.pid for rank in each]
        began = time.monotonic()
    assert time.monotonic() - began < END_SECONDS, "they end by themselves when their input is closed"
    assert ends(*pids)


def test_an_answer_may_be_long_and_the_rank_may_print():
    with ranks(1) as (rank,):
        assert rank.call("long", length=3_000_000) == "x" * 3_000_000
        assert rank.call("add", one=1, other=1) == 2


def test_a_rank_sees_no_packages_but_those_it_is_told_of(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    with ranks(1) as (rank,):
        folder, *path = rank.call("path")
        assert "/somewhere/else" not in path
        assert path.index(str(KITS)) < path.index(str(KITS.parents[1]))
        assert Path(folder) != Path.cwd()
        assert rank.call("input") == "", "what it starts cannot take its commands"
    assert not Path(folder).exists()


def test_an_error_comes_back_with_its_traceback_and_the_rank_goes_on():
    with ranks() as each:
        with pytest.raises(RankError, match=r"rank 1, 'fail': ValueError: fails on purpose") as caught:
            each[1].call("fail")
        assert "benchrank.py" in str(caught.value)
        assert "in fail" in str(caught.value)
        with pytest.raises(RankError, match="AttributeError"):
            each[1].call("no_such_command")
        with pytest.raises(ValueError, match="leading underscore"):
            each[1].call("_blocked")
        for kind in ("object", "nan"):
            with pytest.raises(RankError, match="JSON cannot hold"):
                each[1].call("no_json", kind=kind)
        with pytest.raises(ValueError, match="JSON"):
            each[1].call("add", one=float("nan"), other=0)
        assert each[1].call("add", one=1, other=1) == 2


def test_commands_are_answered_one_by_one():
    with ranks() as each:
        each[0].start("add", one=1, other=1)
        with pytest.raises(RankError, match="has not answered 'add'"):
            each[0].start("add", one=1, other=1)
        assert each[0].result() == 2
        with pytest.raises(RankError, match="was asked nothing"):
            each[0].result()


def test_a_rank_that_dies_is_named_with_its_last_words():
    with ranks() as each:
        each[0].start("hang")
        each[1].start("die")
        began = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 ended \(SIGKILL\) during 'die'(.|\n)*last words"):
            each.results(timeout=60)
        assert time.monotonic() - began < 10, "seen at once, though rank 0 is blocked"
        with pytest.raises(RankError, match="rank 1 has not answered"):
            each[1].call("told")
    with ranks(1) as (rank,), pytest.raises(RankError, match=r"status 3"):
        rank.call("leave", status=3)


def test_a_rank_that_is_killed_between_two_commands():
    with ranks(1) as (rank,):
        os.kill(rank.pid, 9)
        assert ends(rank.pid)
        with pytest.raises(RankError, match=r"ended \(SIGKILL\) during 'told'"):
            rank.call("told")


def test_its_death_is_seen_though_a_child_holds_its_descriptors():
    with ranks(1) as (rank,), pytest.raises(RankError, match="SIGKILL"):
        rank.call("fork_and_die", timeout=30)


def test_a_rank_that_hangs_says_where_and_is_killed():
    with ranks() as each:
        pids = [rank.pid for rank in each]
        with pytest.raises(RankTimeout, match=r"rank 0 has not answered 'hang' within 2 s") as caught:
            each[0].call("hang", timeout=2.0)
        assert "in _blocked" in str(caught.value), "the stacks of its threads"
        assert each[1].call("add", one=1, other=1) == 2
        began = time.monotonic()
    assert time.monotonic() - began < END_SECONDS, "it is busy: no time is given"
    assert ends(*pids)


def test_a_stopped_rank_is_killed_too():
    with ranks(2) as each:
        pids = [rank.pid for rank in each]
        with pytest.raises(RankTimeout):
            each[0].call("stop", timeout=0.2)
        os.kill(each[1].pid, signal.SIGSTOP)  # not busy: it is given its time
    assert ends(*pids)


def test_what_a_rank_forked_goes_with_it():
    with ranks(1) as (rank,):
        child = rank.call("fork")
        assert not gone(child)
    assert ends(child)


def test_a_rank_that_cannot_be_made_takes_the_others_along():
    made = ranks(3, refuse=1)
    with pytest.raises(RankError, match="rank 1, 'start': LookupError: nothing to serve"), made:
        pytest.fail("entered without rank 1")
    assert len(made) == 0


def test_an_interpreter_that_is_not_there():
    with pytest.raises(FileNotFoundError), Ranks("benchrank:make", 2, python="/nowhere/python"):
        pytest.fail("entered without an interpreter")
