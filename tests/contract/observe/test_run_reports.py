"""What the launcher tells of a run without a worlds file: worlds that workers join by themselves, log files."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kits.contract.runkit import launched

from multiworld.run.control.sockets import sockets
from multiworld.run.view.status import ask_all

SCRIPT = """
import os, subprocess, torch
import multiworld as mw

if len(sys.argv) > 1:  # a child of the worker, with its environment
    world = mw.join("own", 0, 1, store=f"file://{sys.argv[1]}")
    tell("child")
    hold()
    sys.exit()
at = sys.argv[0] + ".store"
rank = int(os.environ["RANK"])
world = mw.join("pair", rank, 2, store=f"file://{at}", timeout=120, hang_timeout=30)
child = subprocess.Popen([sys.executable, __file__, f"{at}.child{rank}.{_attempt}"]) if rank == 0 else None
tell("in", generation=world.generation)
while world.generation < 2:
    try:
        world.recv(torch.zeros(1), 1 - rank)
    except mw.BrokenWorldException:
        world.rejoin()
tell("again", generation=world.generation)
hold()
world.close()
if child is not None:
    child.wait()
"""


def snapshot(run):
    name = run.wait_line("event=run-started")[0].split(" run=")[1].split()[0]
    found = [each.snapshot for each in ask_all(sockets(), 30) if each.snapshot is not None]
    return next(each for each in found if each["run_id"] == name)


def worlds(run):
    return {each["name"]: each for each in snapshot(run)["worlds"]}


def test_worlds_that_workers_join_themselves_are_seen(tmp_path):
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    with launched(tmp_path, SCRIPT, options=options) as run:
        lost = next(each for each in run.wait_told("in", 2) if each.rank == 1)
        run.wait_told("child")
        run.wait_for(lambda: worlds(run)["pair"]["state"] == "active", "an active world")
        assert [each["rank"] for each in worlds(run)["pair"]["members"]] == [0, 1]
        assert list(worlds(run)) == ["pair"], "a child that has the worker's environment is not the worker"
        os.kill(lost.pid, signal.SIGKILL)
        run.wait_told("again", 2)
        run.wait_for(lambda: worlds(run)["pair"]["generation"] == 2, "its next generation")
        (fault,) = snapshot(run)["faults"]
        assert (fault["world"], fault["cause"], fault["ranks"]) == ("pair", "crashed", [1])
        assert {"seen", "active"} <= {each["what"] for each in fault["steps"]}
        run.say()
        assert run.ended() == 0
        assert "worlds_broken=1" in run.text("err")
        assert run.leftovers() == []


@pytest.mark.parametrize("restart", ["worker", "group"])
def test_log_files_of_each_attempt_are_told(tmp_path, restart):
    script = """
print(f"rank {_rank} attempt {_attempt}", flush=True)
tell("up")
if _attempt == 0:
    hold("fail")
    sys.exit(1)
hold()
"""

    def written():
        found = {each["rank"]: each["logs"] for each in snapshot(run)["workers"]}
        return {rank: Path(logs["stdout"]).read_text() for rank, logs in found.items() if "stdout" in logs}

    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--restart", restart]
    options += ["--log-dir", str(tmp_path / "logs"), "--redirects", "1"]
    with launched(tmp_path, script, options=options) as run:
        for attempt in (0, 1):
            run.wait_told("up", 2, attempt=attempt)
            run.wait_line("event=started", count=2 * (attempt + 1))
            assert written() == {rank: f"rank {rank} attempt {attempt}\n" for rank in (0, 1)}
            run.say("go" if attempt else "fail")
        assert run.ended() == 0
