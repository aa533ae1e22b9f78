"""What the part elastic makes of what was measured, and how its processes are killed, awaited and ended."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.elastic import environments
from benchmarks.elastic import part as elastic
from benchmarks.elastic import torchrun as runs
from benchmarks.elastic.part import Losses
from benchmarks.figures.figure import summary
from benchmarks.figures.goals import answers
from benchmarks.measuring.part import Run
from benchmarks.measuring.ranks import Ranks
from m8d_build.errors import WheelUnreachable
from m8d_build.settings import Settings

KITS = Path(__file__).parents[2] / "kits"


def options(*given):
    parser = argparse.ArgumentParser()
    elastic.PART.add_options(parser)
    return parser.parse_args(given)


def line(noticed, active, first, *, generation=2, size=2, retries=0):
    times = {"noticed": noticed, "active": active, "first": first}
    return {"times": times, "generation": generation, "size": size, "retries": retries}


def test_a_loss_lasts_until_the_last_survivor():
    found = Losses()
    found.add(1.0, [line(1.01, 1.03, 1.06), line(1.02, 1.035, 1.045, retries=2)], 2)
    found.add(2.0, [line(2.01, 2.02, 2.03), line(2.01, 2.02, 2.04)], 2)
    assert found.took == pytest.approx([60, 40])
    assert found.phases["noticed"] == pytest.approx([20, 10])
    assert found.phases["began"] == []
    remarks = []
    figure = elastic.figure(Run(remark=remarks.append), "4/file/reform", found, elastic._GOALS[4])
    assert (figure.value, figure.quantiles["max"]) == pytest.approx((50, 60))
    assert figure.goal == elastic._GOALS[4]
    assert figure.series["timeline"] == {"noticed": 15.0, "active": 27.5, "first": 50.0}
    assert figure.note.endswith("(known after 15 ms, active after 28 ms)")
    assert remarks == ["elastic/4/file/reform: 2 reforms came to nothing and were made again"]


def test_workers_that_are_started_again_have_no_size():
    found = Losses()
    found.add(1.0, [{"times": {"began": 1.5, "active": 2.0, "first": 3.0}}])
    figure = elastic.figure(Run(), "torchrun/4", found)
    assert figure.value == pytest.approx(2000)
    assert "started again after 500 ms, active after 1000 ms" in figure.note


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(1.1, 1.2, 1.3), line(1.1, 1.2, 1.3, generation=3)], "not in one generation of 2"),
        ([line(1.1, 1.2, 1.3, size=3), line(1.1, 1.2, 1.3, size=3)], "not in one generation of 2"),
        ([line(1.1, 1.2, 1.3), line(0.5, 0.6, 0.9)], "0.100 s before the kill"),
    ],
)
def test_what_is_no_survival(lines, said):
    with pytest.raises(RuntimeError, match=said):
        Losses().add(1.0, lines, 2)


def test_every_goal_has_its_line():
    kinds = [kind for kind in elastic._NOTES if kind[0].isdigit()]
    assert {int(kind.split("/")[0]) for kind in kinds} == {*elastic._GOALS} == {4, 32}
    aimed = [
        summary("elastic", kind, [1.0], "ms", goal=elastic._GOALS[int(kind.split("/")[0])]) for kind in kinds
    ]
    taken = [(target, figure) for target, found in answers(aimed) for figure in found]
    assert len(taken) == len(aimed)
    for target, figure in taken:
        assert re.fullmatch(rf"≤ {figure.goal.limit:g} ms", target.limit), figure.key


@pytest.mark.parametrize(
    ("full", "given", "expected"),
    [
        (False, [], ["4/file/reform", "4/tcp/reform", "4/file/shrink", "32/file/reform", "32/tcp/reform"]),
        (True, [], [*elastic._NOTES]),
        (False, ["--kinds", "torchft/4", "4/tcp/reform"], ["4/tcp/reform", "torchft/4"]),
    ],
)
def test_what_is_beside_us_is_measured_in_full_or_by_name(monkeypatch, full, given, expected):
    found = Losses()
    found.add(0.0, [line(0.1, 0.2, 0.3)])

    def made(run, kinds):
        return [elastic.figure(run, kind, found) for kind in kinds]

    monkeypatch.setattr(elastic, "_ours", made)
    monkeypatch.setattr(elastic, "_torchft", made)
    monkeypatch.setattr(elastic, "_torchrun", lambda _run: found)
    figures = list(elastic.measure(Run(full=full, options=options(*given))))
    assert [figure.name for figure in figures] == expected


def test_torchft_that_cannot_be_had_is_said(monkeypatch, tmp_path):
    def missing(_settings, *, log):
        raise WheelUnreachable(f"no index, says {log.name}", next_step="Check the network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environments, "packages", missing)
    remarks = []
    run = Run(options=options("--kinds", "torchft/4"), remark=remarks.append)
    assert list(elastic.measure(run)) == []
    assert len(remarks) == 1
    assert "torchft==0.2.0 cannot be had here: no index, says bench-torchft.log" in remarks[0]


def test_packages_are_installed_once(tmp_path, monkeypatch):
    asked = []

    def pip(command, **_more):
        asked.append(command)
        if "--target" in command:
            Path(command[command.index("--target") + 1]).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments.proc, "run", pip)
    settings = Settings.load(cache=tmp_path, environ={})
    folder = environments.packages(settings, log=tmp_path / "log")
    assert folder == environments.folder_of(settings)
    assert folder.is_dir()
    needs, peer, tried = asked
    assert [*needs[-3:]] == [*environments.NEEDS]
    assert peer[-2:] == ["--no-deps", environments.PEER], "torch is the one that is there"
    assert "torchft.manager" in tried[-2]
    assert environments.packages(settings, log=tmp_path / "log") == folder
    assert len(asked) == 3


def test_members_are_forked_lost_and_ended():
    with Ranks("benchherd:make", 1, env={"PYTHONPATH": str(KITS)}, start_timeout=30) as (rank,):
        for number in (0, 2):
            rank.call("gather", count=3, word="heard")
            pids = rank.call("pids")
            told = rank.call("lose", number=number)
            assert rank.call("pids") == [pid for place, pid in enumerate(pids) if place != number]
            assert [each["generation"] for each in told["lines"]] == [n for n in range(3) if n != number]
            assert {(each["size"], each["word"]) for each in told["lines"]} == {(2, "heard")}
            rank.call("scatter")
            assert rank.call("pids") == []
            assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "output").write_text("what torchrun said")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield runs.Torchrun(process, tmp_path, tmp_path / "output")
        process.kill()


def test_workers_are_there_when_each_has_written(run, tmp_path):
    for rank in range(runs.WORKERS):
        (tmp_path / f"1-{rank}").write_text(json.dumps({"pid": rank, "times": {"first": 2.0}}))
    assert [each["pid"] for each in run.workers(1)] == [0, 1, 2, 3]


def test_workers_that_do_not_come(run, monkeypatch):
    monkeypatch.setattr(runs, "_TIMEOUT", 0.05)
    with pytest.raises(runs.TorchrunError, match=r"(?s)no workers after 0.05 s.*what torchrun said"):
        run.workers(0)
    run._process.kill()
    run._process.wait()
    with pytest.raises(runs.TorchrunError, match="ended with -9"):
        run.workers(0)
