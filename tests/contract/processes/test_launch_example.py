"""examples/launch_subprocesses.py, run as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.everyday

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "launch_subprocesses.py"
PATIENCE = 180.0  # seconds; four processes load torch on a machine that may be busy


def run(*arguments: object, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    return subprocess.run(
        [sys.executable, *before, str(EXAMPLE), *map(str, arguments)],
        env={**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def losses(done: subprocess.CompletedProcess[str], here: int) -> tuple[str, str]:
    found = re.search(
        rf"^{here} here: loss ([\d.]+) to ([\d.]+), all agree: True$", done.stdout, re.MULTILINE
    )
    assert done.returncode == 0, done.stderr
    assert found, (done.stdout, done.stderr)
    return found[1], found[2]


@pytest.mark.timeout(600)
def test_replicas_and_worlds_change_nothing():
    """The same model and the same batch, divided in other ways: the same losses."""
    alone = losses(run("--processes", 2), 2)
    assert float(alone[1]) < float(alone[0]) / 2
    assert losses(run("--processes", 4, "--world", "mine", "--launch-method", "forkserver"), 4) == alone


def test_under_torchrun_it_runs_in_place():
    done = run(before=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 here: ") == 2


def test_a_wrong_number_is_told_in_a_line():
    done = run("--processes", 3)
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: world_size=3, model_parallelism=2")
    assert "Traceback" not in done.stderr
