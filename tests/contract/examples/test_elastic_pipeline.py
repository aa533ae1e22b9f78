"""examples/elastic_pipeline as its page says: kill any worker, the rate returns, nothing is lost but what it held."""

from __future__ import annotations

import os
import re
import signal

import pytest
from kits.contract.runkit import ROOT, launched

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "elastic_pipeline"
PATIENCE = 180.0
ROOM = 4  # of the example: what a process holds at most
RATE = re.compile(r"[1-9]\d* requests/s$")  # all worlds are there
LINKS = 4  # of the best connected stage: a request more may be on each


def test_a_killed_stage_comes_back_and_takes_only_its_own_requests_along(tmp_path):
    with launched(
        # Slowly: a stage that stands still as it is killed loses all that are on their way to it.
        tmp_path, EXAMPLE / "pipeline.py", "--seconds", "600", "--rate", "12",
        options=["--worlds", str(EXAMPLE / "worlds.toml"), "--max-restarts", "10"],
        env={"M8D_HANG_TIMEOUT": "30"},  # a machine that stalls is no worker that hangs
    ) as run:  # fmt: skip
        there = run.wait_line(r"is there, pid", count=7, timeout=PATIENCE)
        pids = dict(re.search(r"(\w+:\d) is there, pid (\d+)", line).groups() for line in there)
        assert sorted(pids) == ["first:0", "first:1", "front:0", "second:0", "second:1", "third:0", "third:1"]
        run.wait_line(r"[1-9]\d* requests/s", count=2, timeout=PATIENCE)
        os.kill(int(pids["second:1"]), signal.SIGKILL)
        back = run.wait_line(r"second:1 is there, pid", count=2, timeout=PATIENCE)[1]
        assert int(back.rpartition("pid ")[2].partition(",")[0]) != int(pids["second:1"])
        seen = len(run.lines())
        run.wait_for(
            lambda: len([line for line in run.lines()[seen:] if RATE.search(line)]) >= 2,
            "requests flow again",
            timeout=PATIENCE,
        )
        os.kill(int(pids["front:0"]), signal.SIGUSR1)
        (told,) = run.wait_line(r"requests, .* were inside workers that died", timeout=PATIENCE)
        assert run.ended(PATIENCE) == 0, run.report()
        total, answered, wrong, lost = map(int, re.findall(r"\d+", told))
        assert answered > 0
        assert (wrong, answered + lost) == (0, total)
        assert lost <= ROOM + 2 * LINKS
        assert "Traceback" not in run.text()
        restarted = [line for line in run.lines() if "event=restarting" in line]
        assert len(restarted) == 1, restarted
        assert "role=second:1" in restarted[0]
        assert run.leftovers() == []


ENDS_LATE = f"""
import os, runpy
if _attempt == 0:  # all others have done their part; this one was killed before it had
    raise SystemExit(os.environ["ROLE_NAME"] + os.environ["ROLE_RANK"] == "third1")
sys.argv = [{str(EXAMPLE / "pipeline.py")!r}, "--seconds", "1"]
sys.path.insert(0, {str(EXAMPLE)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_worker_that_is_started_again_after_its_neighbours_have_ended_ends_too(tmp_path):
    with launched(
        tmp_path, ENDS_LATE,
        options=["--worlds", str(EXAMPLE / "worlds.toml"), "--max-restarts", "2"],
        env={"M8D_JOIN_TIMEOUT": "3"},  # no other member comes, however long it waits
    ) as run:  # fmt: skip
        assert run.ended(PATIENCE) == 0, run.report()
        assert "third:1 ends: its neighbours did not come" in run.text()
        assert len([line for line in run.lines() if "event=restarting" in line]) == 1, run.report()
        assert "Traceback" not in run.text()
