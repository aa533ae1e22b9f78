"""Nodes with unequal numbers of workers: the worlds file says how many there are, and nodes share them as they can."""

from __future__ import annotations

import pytest
from kits.contract.launcherskit import nodes
from kits.contract.runkit import ROOT, script

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "elastic_pipeline"
PATIENCE = 180.0
SHOWS = """
tell("up", role=_os.environ["ROLE_NAME"], **{name: int(_os.environ[name.upper()]) for name in (
    "local_rank", "local_world_size", "world_size")})
hold()
"""
HUB = """
[roles]
hub = 1
worker = 4

[worlds."w{i}"]
for = "worker"
members = ["hub:0", "worker:{i}"]
"""


def test_the_shipped_worlds_file_on_three_nodes(tmp_path):
    """7 workers, which neither 2 nor 3 divides: refused before, whatever was given."""
    program = [str(EXAMPLE / "pipeline.py"), "--seconds", "2", "--rate", "20"]
    with nodes(tmp_path, 3, *program, options=["--worlds", str(EXAMPLE / "worlds.toml")]) as runs:
        assert [run.ended(PATIENCE) for run in runs] == [0, 0, 0], "\n".join(run.report() for run in runs)
        lines = [line for run in runs for line in run.lines()]
        assert len([line for line in lines if "event=started" in line]) == 7
        counts = sorted(sum("event=started" in line for line in run.lines()) for run in runs)
        assert counts == [2, 2, 3]
        assert len([line for line in lines if "is there, pid" in line]) == 7


def test_the_shipped_worlds_file_on_two_nodes_knows_its_local_size(tmp_path):
    path = script(tmp_path, SHOWS)
    with nodes(tmp_path, 2, str(path), options=["--worlds", str(EXAMPLE / "worlds.toml")]) as runs:
        told = [(run, each) for run in runs for each in wait(runs, run)]
        assert sorted(each.rank for _, each in told) == list(range(7))
        for run, each in told:
            assert each["world_size"] == 7
            assert each["local_world_size"] == len(run.told("up"))
        end(runs)


@pytest.mark.parametrize("hub", [0, 1, 2])
def test_a_hub_beside_nodes_of_two(tmp_path, hub):
    """The node with one worker has the hub, wherever torch's rendezvous puts it."""
    (tmp_path / "w.toml").write_text(HUB)
    path = script(tmp_path, SHOWS)
    share = lambda number: ["--nproc-per-node", "1" if number == hub else "2"]  # noqa: E731
    with nodes(tmp_path, 3, str(path), options=["--worlds", str(tmp_path / "w.toml")], each=share) as runs:
        told = [each for run in runs for each in wait(runs, run)]
        assert [(each["role"], each.rank) for each in runs[hub].told("up")] == [("hub", 0)]
        assert sorted(each.rank for each in told) == list(range(5))
        assert sorted(each["local_world_size"] for each in told) == [1, 2, 2, 2, 2]
        end(runs)


def test_nodes_that_have_no_room_for_all_say_so(tmp_path):
    path = script(tmp_path, SHOWS)
    worlds = str(EXAMPLE / "worlds.toml")
    with nodes(tmp_path, 2, str(path), options=["--worlds", worlds, "--nproc-per-node", "3"]) as runs:
        assert [run.ended(PATIENCE) for run in runs] == [1, 1]
        for run in runs:
            assert "7 workers of" in run.text("err")
            assert "have room for 6" in run.text("err")
            assert run.told("up") == []


def wait(runs, run):
    """What the workers of one node told, once all have."""
    total = 7 if "elastic_pipeline" in " ".join(run.process.args) else 5
    run.wait_for(
        lambda: sum(len(each.told("up")) for each in runs) == total, "all workers are up", timeout=PATIENCE
    )
    return run.told("up")


def end(runs):
    for run in runs:
        run.say()
    assert [run.ended(PATIENCE) for run in runs] == [0] * len(runs), "\n".join(run.report() for run in runs)
