"""A torchrun command line under m8d-run: the same workers in the same environment."""

from __future__ import annotations

import os
import sys
import textwrap
import time

import pytest
from kits.contract import runkit
from kits.contract.nodekit import free_port
from torch.distributed import run as torchrun

SHOWS = """
tell("up", environ=dict(_os.environ), argv=sys.argv)
"""
TORCHRUN = "torch.distributed.run"
OPTIONS = {option for action in torchrun.get_args_parser()._actions for option in action.option_strings}
KEYS = ("RANK", "WORLD_SIZE", "ROLE_", "GROUP_", "LOCAL_", "MASTER_", "TORCH", "OMP_", "CUDA_", "PET_")
DIFFER = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_ADDR"}
"""Ports, ids and folders of a run: there in both, and never the same twice (MASTER_ADDR: compared apart)."""


ALONE = ["--standalone"] if torchrun.get_args_parser().get_default("master_port") == 29500 else []
"""What a run that is alone is like: where torchrun takes port 29500 for one (torch 2.4, 2.6), m8d-run does not."""


def environments(folder, name, module, options, command=None, env=None):
    where = folder / name
    where.mkdir()
    with runkit.launched(
        where, SHOWS, "--arg", "x", options=options, module=module, command=command, env=env
    ) as run:
        assert run.ended() == 0, run.report()
        told = {t.rank: t for t in run.told("up")}
    shown = {
        rank: {key: value for key, value in t.environ.items() if key.startswith(KEYS)}
        for rank, t in told.items()
    }
    arguments = {rank: [part.replace(str(where), "") for part in t.argv] for rank, t in told.items()}
    return shown, arguments


_theirs = {}
"""What torch's launchers gave: theirs knows nothing of our options, and is run once for all values of those."""


def compare(folder, options, *, own=(), theirs=TORCHRUN, env=None):
    ours, our_arguments = environments(folder, "ours", "multiworld.run", [*own, *options], env=env)
    if not {"--rdzv-backend", "--master-addr"} & set(options):
        options = [*ALONE, *options]
    run = (theirs, *options, *(env or {}).items())
    if run not in _theirs:
        _theirs[run] = environments(folder, "theirs", theirs, options, env=env)
    want, their_arguments = _theirs[run]
    assert our_arguments == their_arguments
    assert ours.keys() == want.keys()
    for rank, environ in want.items():
        assert ours[rank].keys() == environ.keys(), rank
        for key in environ.keys() - DIFFER:
            assert ours[rank][key] == environ[key], (rank, key)
        for key in DIFFER & environ.keys():
            assert bool(ours[rank][key]) == bool(environ[key]), (rank, key)
    return ours


@pytest.mark.parametrize("restart", ["worker", "group"])
@pytest.mark.parametrize(
    "options",
    [
        "--nproc-per-node 2",
        "--standalone --nproc-per-node 2 --max-restarts 4 --role trainer",
        "--nproc_per_node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id job-7",
        "--nproc-per-node 2 --virtual-local-rank",
    ],
)
def test_the_environment_is_torchruns(tmp_path, options, restart):
    words = options.split()
    if any(word.startswith("--") and word not in OPTIONS for word in words):
        pytest.skip("this torch has no such option")
    ours = compare(tmp_path, words, own=["--restart", restart])
    assert set(ours) == {0, 1}


def test_the_environment_with_a_static_rendezvous(tmp_path):
    port = str(free_port())
    options = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    ours = compare(tmp_path, options)
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in ours.values()} == {("127.0.0.1", port)}


def test_the_environment_by_variables_of_torchrun(tmp_path):
    ours = compare(tmp_path, [], env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r", "OMP_NUM_THREADS": "3"})
    assert {e["OMP_NUM_THREADS"] for e in ours.values()} == {"3"}


def test_visible_devices_are_handed_on(tmp_path):
    compare(tmp_path, ["--nproc-per-node", "2"], env={"CUDA_VISIBLE_DEVICES": "5,7"})


def test_torch_distributed_launch_with_use_env(tmp_path):
    compare(tmp_path, ["--nproc_per_node=2", "--use_env"], theirs="torch.distributed.launch")


def test_torch_distributed_launch_without_use_env(tmp_path):
    compare(tmp_path, ["--nproc_per_node=2"], own=["--no-use-env"], theirs="torch.distributed.launch")


def test_ways_to_name_the_program(tmp_path):
    (tmp_path / "ourmodule.py").write_text(runkit.PRELUDE + SHOWS)
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n" + runkit.PRELUDE + SHOWS)
    program.chmod(0o755)
    for options in (
        ["-m", "ourmodule"],
        ["--no-python", str(program)],
        ["--run-path", str(tmp_path / "ourmodule.py")],
    ):
        command = [sys.executable, "-m", "multiworld.run", "--nproc-per-node", "2", *options, "--arg", "x"]
        env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{runkit.ROOT}"}
        with runkit.launched(tmp_path, "", command=command, env=env) as run:
            assert run.ended() == 0, run.report()
            assert [t.argv[1:] for t in run.told("up")] == [["--arg", "x"]] * 2


def test_a_program_of_torchrun_with_one_group_for_all(tmp_path):
    """A plain torch.distributed script, as it is."""
    script = textwrap.dedent("""
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        tell("sum", total=total.item())
        dist.destroy_process_group()
    """)
    for restart in ("worker", "group"):
        with runkit.launched(
            tmp_path, script, options=["--nproc-per-node", "3", "--restart", restart]
        ) as run:
            assert run.ended() == 0, run.report()
            assert [t.total for t in run.told("sum")] == [6.0] * 3


FAILS = """
tell("up")
if _rank == 1 and _attempt < 2:
    sys.exit(7)
hold()
"""


def test_restart_group_restarts_all_as_torchrun_does(tmp_path):
    stories = []
    for module, own in ((TORCHRUN, []), ("multiworld.run", ["--restart", "group"])):
        folder = tmp_path / module
        folder.mkdir()
        options = [*own, "--nproc-per-node", "3", "--max-restarts", "2"]
        with runkit.launched(folder, FAILS, options=options, module=module) as run:
            run.wait_told("up", 3, attempt=2)
            run.say()
            assert run.ended() == 0
            # A worker may be ended by torch before its first line.
            stories.append(
                {t.rank for t in run.told("up", attempt=2)} | {t.attempt for t in run.told("up", rank=1)}
            )
            assert run.leftovers() == []
    assert stories[0] == stories[1] == {0, 1, 2}


@pytest.mark.parametrize("restart", ["worker", "group"])
@pytest.mark.parametrize(
    ("how", "code"), [("sys.exit(7)", 7), ("_os.kill(_os.getpid(), signal.SIGKILL)", 128 + 9)]
)
def test_exit_codes(tmp_path, restart, how, code):
    script = f"tell('up')\nif _rank == 1:\n    {how}\nhold()\n"
    with runkit.launched(tmp_path, script, options=["--nproc-per-node", "2", "--restart", restart]) as run:
        assert run.ended() == code
        assert run.text().count("Root Cause") == 1
        assert run.leftovers() == []


def test_group_uses_up_its_restarts(tmp_path):
    options = ["--nproc-per-node", "2", "--restart", "group", "--max-restarts", "1"]
    script = "tell('up')\nif _rank == 1:\n    sys.exit(7)\nhold()\n"
    with runkit.launched(tmp_path, script, options=options) as run:
        assert run.ended() == 7
        assert len(run.told("up", rank=1)) == 2
        assert "the group had been restarted once (--max-restarts 1)" in run.text()


def test_the_grace_period_of_a_group_whose_worker_failed(tmp_path):
    """torch's context has one of its own, of 30 s, for the others."""
    options = ["--nproc-per-node", "2", "--restart", "group", "--grace", "1"]
    script = """
if _rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("up")
hold("go" if _rank == 0 else "never")
sys.exit(7)
"""
    with runkit.launched(tmp_path, script, options=options) as run:
        run.wait_told("up", 2)
        began = time.monotonic()
        run.say()
        assert run.ended() == 7
        assert time.monotonic() - began < 25
        assert run.leftovers() == []


def test_json_log(tmp_path):
    import json

    options = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "--restart-backoff",
        "0",
        "--log-format",
        "json",
    ]
    with runkit.launched(tmp_path, FAILS, options=options) as run:
        run.wait_told("up", 1, rank=1, attempt=2)
        run.say()
        assert run.ended() == 0
        lines = [json.loads(line) for line in run.lines("err") if line.startswith("{")]
        seen = [(line["event"], line.get("worker")) for line in lines]
        assert seen[0] == ("run-started", None)
        assert ("failed", 1) in seen
        assert seen[-1] == ("run-ended", None)
