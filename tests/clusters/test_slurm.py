"""deploy/slurm on a real Slurm, whose nodes are machines made of namespaces."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from clusterworker import WORLDS, told
from slurmkit import Slurm

from multiworld.run.options import parse

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "deploy" / "slurm"
WORKER = Path(__file__).parent / "clusterworker.py"
PATIENCE = 120.0
"""Seconds, of jobs that all import torch on two cores with other work."""

log = logging.getLogger("measured")

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def slurm(need, tmp_path_factory):
    for program in ("slurmctld", "slurmd", "munged", "sbatch"):
        need(program, "apt-get install slurm-wlm munge")
    with Slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


class Job:
    """A job with a file of deploy/slurm, whose workers are clusterworker.py."""

    def __init__(self, slurm, folder, file, *options, workers, worker=(), sbatch=()):
        self.slurm, self.folder = slurm, folder
        worlds = folder / "worlds.toml"
        worlds.write_text(WORLDS.format(workers=workers))
        programs = folder / "bin"
        programs.mkdir()
        (programs / "m8d-run").write_text(f'#!/bin/sh\nexec {sys.executable} -m multiworld.run "$@"\n')
        (programs / "m8d-run").chmod(0o755)
        env = {
            "PYTHONPATH": str(ROOT), "PATH": f"{programs}:{slurm.env['PATH']}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.number = slurm.submit(
            f"--chdir={folder}", *sbatch, file, *options, "--worlds", worlds, WORKER, folder, *worker, env=env
        )

    def told(self, name, **match):
        return told(self.folder, name, **match)

    def wait(self, count, name, **match):
        """Wait until workers told that many different things by a name."""

        def enough():
            return len(found := self.told(name, **match)) >= count and found

        try:
            return self.slurm.wait(enough, f"{count} x {name} {match}", PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def go(self):
        (self.folder / "go").touch()

    def ended(self):
        return self.slurm.ended(self.number, PATIENCE)

    def log(self):
        return (self.folder / f"m8d-{self.number}.log").read_text(errors="replace")

    def left(self):
        """Processes of the job on its nodes."""
        return [pid for node in self.slurm.nodes for pid in self.slurm.hosts.pids(node, str(self.folder))]


def test_a_job_joins_worlds_between_its_nodes(slurm, tmp_path):
    job = Job(slurm, tmp_path, SLURM / "m8d.sbatch", "--nproc-per-node", "1", workers=1)
    born = job.wait(2, "born")
    assert {each["host"] for each in born} == {"n1", "n2"}
    assert {each["run"] for each in born} == {f"slurm-{job.number}.0"}
    assert {each["cpus"] for each in born} == {min(2, os.cpu_count())}
    job.wait(2, "active", world="w0", generation=1)
    job.go()
    assert job.ended() == ("COMPLETED", "0:0"), job.log()
    assert job.left() == []


def test_a_spare_node_takes_the_place_of_a_lost_one(slurm, tmp_path):
    """Its machine ends: Slurm's daemons on it, the launcher and the workers. The first node has the job's script."""
    job = Job(
        slurm, tmp_path, SLURM / "m8d-spare.sbatch", "--nproc-per-node", "2", "--node-hang-timeout", "3",
        workers=3,
    )  # fmt: skip
    job.wait(6, "active", generation=1)
    before = {each["rank"]: each for each in job.told("born")}
    hosts = {each["host"] for each in before.values()}
    lost = max(hosts)  # n2 or n3: two nodes work, one stands by
    others = [each for each in before.values() if each["host"] != lost]
    at = time.monotonic()
    slurm.hosts.lose(lost)
    try:
        broken = {f"w{rank - 1}" for rank in (1, 2, 3) if lost in {before[0]["host"], before[rank]["host"]}}
        active = job.wait(2 * len(broken), "active", generation=2)
        log.info("worlds are whole again %.1f s after their node was lost", max(e["at"] for e in active) - at)
        assert {each["world"] for each in active} == broken
        assert {each["world"] for each in job.told("broke")} == broken
        again = [each for each in job.told("born") if each not in before.values()]
        assert sorted(each["rank"] for each in again) == sorted(r for r in before if before[r] not in others)
        assert {each["host"] for each in again} == set(slurm.nodes) - hosts
        for each in others:
            assert each["pid"] in {e["pid"] for e in job.told("active", rank=each["rank"])}
            assert len(job.told("born", rank=each["rank"])) == 1
        job.go()
        assert job.ended() == ("COMPLETED", "0:0"), job.log()
        assert {each["rank"] for each in job.told("end")} == {0, 1, 2, 3}
        assert job.left() == []
    finally:
        slurm.boot(lost)
    slurm.idle()


@pytest.fixture
def chained(tmp_path):
    """m8d.sbatch with the line that queues a job again which its time limit ended."""
    text = (SLURM / "m8d.sbatch").read_text()
    line = '[ "$code" != 143 ] || scontrol requeue'
    assert f"# {line}" in text
    path = tmp_path / "chained.sbatch"
    path.write_text(text.replace(f"# {line}", line))
    return path


@pytest.mark.parametrize("how", ["time limit", "lost node"])
def test_a_job_that_is_queued_again_has_a_run_of_its_own(slurm, tmp_path, chained, how):
    """The time limit's signal comes by scancel, which sends it to the same processes."""
    file = chained if how == "time limit" else SLURM / "m8d.sbatch"
    job = Job(slurm, tmp_path, file, "--nproc-per-node", "1", workers=1)
    name = f"slurm-{job.number}.0"
    job.wait(2, "active", run=name)
    if how == "time limit":
        slurm.ask("scancel", "--signal=TERM", job.number, check=True)
    else:
        slurm.hosts.lose("n2")
    active = job.wait(2, "active", run=f"{name}-r1")
    assert {each["host"] for each in active} == {"n1", "n2" if how == "time limit" else "n3"}
    job.go()
    assert job.ended() == ("COMPLETED", "0:0"), job.log()
    assert {each["run"] for each in job.told("end")} == {f"{name}-r1"}
    assert slurm.job(job.number)["Restarts"] == "1"
    assert job.left() == []
    if how == "lost node":
        slurm.boot("n2")
        slurm.idle()


def launcher(slurm, node):
    """The process of m8d-run on a node, as this machine numbers it, but for those that it has started."""
    there = slurm.hosts.pids(node, "multiworld.run")
    parents = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in there}
    (found,) = [pid for pid in there if int(parents[pid]) not in there]
    return found


def test_a_launcher_that_ends_alone_ends_the_job(slurm, tmp_path):
    """As one out of memory: its node lives, so Slurm gives the job no other one, and it would wait for its time limit."""
    job = Job(slurm, tmp_path, SLURM / "m8d.sbatch", "--nproc-per-node", "1", workers=1)
    job.wait(2, "active", generation=1)
    os.kill(launcher(slurm, "n2"), signal.SIGKILL)
    assert job.ended()[0] == "FAILED", job.log()
    assert slurm.job(job.number)["Restarts"] == "0"
    assert job.left() == []


@pytest.mark.parametrize(("file", "loss"), [("m8d.sbatch", "stop"), ("m8d-spare.sbatch", "continue")])
def test_options_of_the_user_win_against_those_of_the_file(file, loss):
    (own,) = re.findall(r"^[^#\n]*srun .*m8d-run (--.*) \"\$@\"", (SLURM / file).read_text(), re.MULTILINE)
    assert parse([*own.split(), "train.py"]).on_node_loss == loss
    options = parse([*own.split(), "--on-node-loss", "continue", "--max-restarts", "3", "train.py"])
    assert (options.on_node_loss, options.torch.max_restarts) == ("continue", 3)


def test_scancel_ends_workers_within_the_grace_period(slurm, tmp_path):
    """These ignore SIGTERM; the launcher has sent SIGKILL long before Slurm does."""
    job = Job(
        slurm, tmp_path, SLURM / "m8d.sbatch", "--nproc-per-node", "1", "--grace", "2", workers=1,
        worker=["--deaf"],
    )  # fmt: skip
    job.wait(2, "active")
    at = time.monotonic()
    slurm.ask("scancel", job.number, check=True)
    assert job.ended()[0] == "CANCELLED", job.log()
    took = time.monotonic() - at
    log.info("a job with deaf workers and --grace 2 ended %.1f s after scancel", took)
    assert took < slurm.kill_wait
    assert job.left() == []
    assert job.told("end") == []
