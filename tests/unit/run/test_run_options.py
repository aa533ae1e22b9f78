"""Every option of torchrun, as the installed torch has it, means the same to m8d-run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the launcher takes torch's own options")

import torch.distributed.launch as old_launch
from torch.distributed import run as torchrun

import multiworld
from multiworld.run import options
from multiworld.run.configuration import configure
from multiworld.run.errors import ArgumentsError
from multiworld.run.main import main
from multiworld.run.options import build_parser, parse
from multiworld.run.worldsfile.load import load
from multiworld.run.worldsfile.parse import parse as parse_worlds
from multiworld.run.worldsfile.worlds_plan import Role, WorldsPlan

ROOT = Path(__file__).parents[3]

OWN = {
    "restart", "worlds", "ui", "log_format", "restart_backoff", "restart_backoff_max", "on_node_loss",
    "node_hang_timeout", "grace", "drain", "secure", "authority", "certificate_days", "preload", "use_env", "verbose",
    "version", "web",
}  # fmt: skip
SAMPLES = {
    "nnodes": "2:3", "nproc_per_node": "3", "rdzv_backend": "c10d", "rdzv_endpoint": "host:1234", "rdzv_id": "job",
    "rdzv_conf": "timeout=30,join_timeout=20", "max_restarts": "7", "monitor_interval": "0.5", "start_method": "fork",
    "event_log_handler": "console", "role": "trainer", "redirects": "0:1,1:2", "tee": "3",
    "local_ranks_filter": "0,2", "duplicate_stdout_filters": "apple,pear", "duplicate_stderr_filters": "a,,b",
    "node_rank": "1", "master_addr": "10.0.0.1", "master_port": "1234", "local_addr": "10.0.0.2",
    "logs_specs": None, "numa_binding": "node", "signals_to_handle": "SIGTERM,SIGUSR1", "shutdown_timeout": "9",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(("PET_", "TORCHELASTIC_", "OMP_NUM_THREADS")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else torch says at length that it sets it


def torch_actions():
    return [
        action
        for action in torchrun.get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    ]


def line_for(action: argparse.Action, option: str, tmp_path) -> list[str] | None:
    if action.nargs == 0:
        return [option]
    value = str(tmp_path / "logs") if action.dest == "log_dir" else SAMPLES[action.dest]
    return None if value is None else [option, value]


def what_torchrun_launches(monkeypatch, argv, parser=torchrun):
    """Run torchrun's own main up to where it would start something."""
    launched = {}

    class Launch:
        def __init__(self, config, entrypoint):
            launched["config"], launched["entrypoint"] = config, entrypoint

        def __call__(self, *args):
            launched["args"] = list(args)

    monkeypatch.setattr(torchrun, "elastic_launch", Launch)
    torchrun.run(parser.parse_args(list(argv)))
    return launched["config"], launched["entrypoint"], launched["args"]


def comparable(config) -> dict:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    logs = fields.pop("logs_specs")
    for name in ("_root_log_dir", "_redirects", "_tee", "_local_ranks_filter"):
        fields[name] = getattr(logs, name)
    fields["_logs"] = type(logs)
    if str(fields["_root_log_dir"]).rpartition("/")[2].startswith("torchelastic_"):
        fields["_root_log_dir"] = "made up"
    if len(fields["run_id"]) == 36:
        fields["run_id"] = "made up"
    return fields


def same(monkeypatch, argv, **more):
    theirs = what_torchrun_launches(monkeypatch, argv, **more)
    ours = configure(parse(argv))
    assert comparable(ours[0]) == comparable(theirs[0])
    assert ours[1:] == theirs[1:]
    return ours


def test_every_option_of_torchs_parser_is_known(tmp_path):
    """All spellings, and the same values in the namespace; fails when torch has an option that has no sample here."""
    for action in torch_actions():
        for option in action.option_strings:
            line = line_for(action, option, tmp_path)
            if line is None:
                continue
            argv = [*line, "script.py", "--flag", "x"]
            theirs = vars(torchrun.parse_args(argv))
            ours = vars(parse(argv).torch)
            assert {name: ours[name] for name in theirs} == theirs, option
            assert set(ours) - set(theirs) == {"use_env"}, option


@pytest.mark.parametrize("dest", sorted(a.dest for a in torch_actions()))
def test_every_option_launches_what_torchrun_launches(monkeypatch, tmp_path, dest):
    action = next(a for a in torch_actions() if a.dest == dest)
    line = line_for(action, action.option_strings[0], tmp_path)
    if line is None:
        pytest.skip("names an entry point of an installed package")
    same(monkeypatch, [*line, "/abs/script.py", "--flag", "x"])


@pytest.mark.parametrize(
    "line",
    [
        "s.py",
        "--standalone --nproc-per-node 2 s.py a b",
        "--standalone --rdzv-backend=c10d --rdzv-endpoint=localhost:0 s.py",
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 4000 --nproc_per_node=4 s.py",
        "--nnodes=1:4 --max_restarts=3 --rdzv_id=1 --rdzv_backend=c10d --rdzv_endpoint=h:29400 s.py --rdzv_id x",
        "--nnodes 2 s.py",
        "--master_port 4000 s.py",
        "--rdzv-backend static --rdzv-endpoint h:1 s.py",
        "--rdzv-backend etcd-v2 --rdzv-endpoint h:2379 --rdzv-conf last_call_timeout=5 s.py",
        "-m package.module --lr 1",
        "--no-python ./program -x",
        "--run-path /abs/s.py -x",
        "--nproc-per-node 2 -t 3 -r 0:1 --log-dir {tmp} s.py",
        "--nproc-per-node cpu s.py",
        "--nproc-per-node auto s.py",
    ],
)
def test_whole_command_lines(monkeypatch, tmp_path, line):
    same(monkeypatch, line.replace("{tmp}", str(tmp_path)).split())


def test_variables_of_torchrun(monkeypatch):
    for name, value in {"NPROC_PER_NODE": "3", "MAX_RESTARTS": "5", "ROLE": "r", "STANDALONE": "1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    config, _, _ = same(monkeypatch, ["s.py"])
    assert (config.nproc_per_node, config.max_restarts, config.role, config.rdzv_backend) == (
        3,
        5,
        "r",
        "c10d",
    )


@pytest.mark.parametrize(
    ("line", "extra"), [("s.py a", ["--no-use-env"]), ("--use_env s.py a", []), ("-m s a", ["--no-use-env"])]
)
def test_command_lines_of_torch_distributed_launch(monkeypatch, line, extra):
    theirs = what_torchrun_launches(monkeypatch, line.split(), parser=old_launch)
    ours = configure(parse([*extra, *line.split()]))
    assert comparable(ours[0]) == comparable(theirs[0])
    assert ours[1:] == theirs[1:]


def test_standalone_as_a_backend():
    config, _, _ = configure(parse(["--rdzv-backend", "standalone", "s.py"]))
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "localhost:0")


def test_the_own_options_and_their_defaults():
    options = parse(["s.py"])
    assert (options.restart, options.worlds, options.ui, options.log_format) == (
        "worker",
        None,
        False,
        "text",
    )
    assert (options.restart_backoff, options.restart_backoff_max, options.grace) == (1.0, 30.0, None)
    assert (options.on_node_loss, options.node_hang_timeout) == ("continue", 5.0)
    line = (
        "--restart group --worlds w.toml --ui --log-format json --restart-backoff 0.5 --restart_backoff_max 2 "
        "--on-node-loss stop --node-hang-timeout 3 --grace 0 s.py --restart x"
    )
    options = parse(line.split())
    assert (options.restart, options.worlds, options.ui, options.log_format) == (
        "group",
        "w.toml",
        True,
        "json",
    )
    assert (options.restart_backoff, options.restart_backoff_max, options.grace) == (0.5, 2.0, 0.0)
    assert (options.on_node_loss, options.node_hang_timeout) == ("stop", 3.0)
    assert options.torch.training_script_args == ["--restart", "x"]


def test_the_own_options_by_variables(monkeypatch):
    monkeypatch.setenv("PET_RESTART", "group")
    monkeypatch.setenv("PET_RESTART_BACKOFF", "2.5")
    options = parse(["s.py"])
    assert (options.restart, options.restart_backoff) == ("group", 2.5)


def test_the_page_says_which_own_options_have_a_variable():
    text = (ROOT / "docs" / "from-torchrun.md").read_text(encoding="utf-8")
    without = {
        action.dest
        for action in build_parser()._actions
        if action.dest in OWN and type(action).__name__ not in {"env", "check_env"}
    }
    assert without == {"use_env", "version"}
    assert "options that m8d-run adds, but for `--use-env`" in " ".join(text.split())


def test_the_page_has_each_own_option():
    text = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    table = text.split("## Options besides torchrun's")[1]
    told = {
        name.replace("-", "_")
        for row in re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE)
        for name in re.findall(r"`--([\w-]+)", row)
    }
    assert told - {"no_use_env"} == OWN


def test_version_and_a_python_without_torch(tmp_path):
    """Neither loads torch; an error line, not a traceback."""
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )

    def run(*arguments):
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]),
        }
        return subprocess.run(
            [sys.executable, "-m", "multiworld.run", *arguments],
            capture_output=True, text=True, check=False, timeout=60, env=environ,
        )  # fmt: skip

    assert run("--version").stdout == f"m8d-run {multiworld.__version__}\n"
    done = run("s.py")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("m8d-run: No module named 'torch'")
    assert "docs/install.md" in line


def test_nothing_of_torchs_is_taken():
    own = {action.dest for action in build_parser()._actions} - {
        a.dest for a in torchrun.get_args_parser()._actions
    }
    assert own == OWN


@pytest.mark.parametrize(
    "line",
    [
        "--restart all s.py", "--log-format xml s.py", "--on-node-loss panic s.py", "--grace -1 s.py", "--grace nan s.py",
        "--restart-backoff inf s.py", "--node-hang-timeout 0 s.py", "--no-python --no-use-env ./p",
        "--nnodes x s.py", "--nnodes 1:2:3 s.py", "--nnodes 3:2 s.py", "--nnodes 0 s.py", "--max-restarts -1 s.py",
        "--nproc-per-node many s.py", "--tee 9 s.py", "--no-python -m p", "--local-ranks-filter a s.py",
        "--rdzv-conf x s.py", "--nproc-per-node 0 s.py", "--nproc-per-node -1 s.py", "--monitor-interval 0 s.py",
        "--monitor-interval nan s.py", "--web nonsense s.py", "--web 127.0.0.1:99999 s.py", "--web :80 s.py",
    ],
)  # fmt: skip
def test_wrong_values_are_said(line):
    with pytest.raises(ArgumentsError) as caught:
        configure(parse(line.split()))
    assert caught.value.rule
    assert caught.value.next_step


def plan(count):
    return WorldsPlan((Role("worker", count, 1),), (), "w.toml")


@pytest.mark.parametrize(
    ("line", "workers", "each"),
    [("s.py", 6, 6), ("--nnodes 2 s.py", 6, 3), ("--nnodes 2:3 s.py", 6, 3), ("--nproc-per-node 6 s.py", 6, 6),
     ("--nnodes 1:4 --nproc-per-node 2 s.py", 6, 2), ("--nnodes 2 s.py", 7, 4), ("--nnodes 3 s.py", 7, 3),
     ("--nnodes 2:3 --nproc-per-node 8 s.py", 9, 8), ("--nnodes 3 --nproc-per-node 1 s.py", 17, 1)],
)  # fmt: skip
def test_a_plan_says_how_many_workers(line, workers, each):
    config, _, _ = configure(parse(line.split()), plan(workers))
    assert config.nproc_per_node == each


@pytest.mark.parametrize(
    "line",
    ["--nproc-per-node 4 s.py", "--nproc-per-node 2 s.py", "--nproc-per-node 1 s.py"],
)
def test_a_number_of_workers_that_does_not_fit_the_plan(line):
    with pytest.raises(ArgumentsError, match=r"w\.toml"):
        configure(parse(line.split()), plan(6))


@pytest.mark.parametrize(
    ("workers", "step"),
    [
        (9, "Leave --nproc-per-node out, or give 2 to 4"),
        (1, "Leave --nproc-per-node out, or give 2 to 4, or change --nnodes"),
    ],
)
def test_the_next_step_of_a_range_names_its_numbers(workers, step):
    ranged = parse_worlds("""[roles]\ntrainer = "2:4"\n[worlds.w]\nmembers = ["trainer:*"]\n""", "w.toml")
    with pytest.raises(ArgumentsError) as raised:
        configure(parse(f"--nproc-per-node {workers} s.py".split()), ranged)
    assert raised.value.next_step == step


def commands():
    """Every command line of m8d-run on README and the pages, as (page, words)."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```(?:console|bash)\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                found = re.match(r"(?:\$ )?(?:m8d-run|python -m multiworld\.run) +(.*)", line)
                if found and not found[1].startswith("status"):
                    words = shlex.split(found[1], comments=True)
                    yield pytest.param(page, words, id=f"{page.name}: {found[1][:60]}")


def worlds_files(page):
    """The worlds files on a page."""
    blocks = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [each for each in blocks if each.startswith("[roles]")]


@pytest.mark.parametrize(("page", "words"), list(commands()))
def test_the_pages_own_commands_work_as_written(page, words):
    """A worlds file that is not in the repository is the page's own, or else that of docs/worlds-file.md."""
    options = parse(words)
    if options.worlds is not None:
        known = ROOT / options.worlds
        (sample,) = worlds_files(page) or worlds_files(ROOT / "docs" / "worlds-file.md")
        given = load(str(known)) if known.is_file() else parse_worlds(sample, options.worlds)
        configure(options, given)
    else:
        configure(options)


def test_a_script_of_gpus_is_told_how_it_stays_on_nccl():
    """The file's default is gloo, which takes CUDA tensors too: without a word of it such a script gets slow."""
    (sample,) = worlds_files(ROOT / "docs" / "from-torchrun.md")
    (world,) = parse_worlds(sample, "worlds.toml").worlds
    assert (world.backend, world.device) == ("nccl", "cuda:{local_rank}")


def test_one_given_by_a_variable_is_given(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "1")
    with pytest.raises(ArgumentsError):
        configure(parse(["s.py"]), plan(6))


def test_a_wrong_variable_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setenv("M8D_JOIN_TIMEOUT", "abc")
    assert main(["--standalone", "s.py"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("m8d-run: M8D_JOIN_TIMEOUT='abc'")


def test_the_help_says_both(capsys):
    with pytest.raises(SystemExit) as done:
        parse(["--help"])
    assert done.value.code == 0
    said = capsys.readouterr().out
    assert "--restart" in said
    assert "--rdzv-endpoint" in said
    assert "a worker that failed is started again: each worker so many times" in " ".join(said.split())
    assert "--verbose" in said
    assert sys.version_info >= (3, 10)


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        (["--nnodes", "2:3", "--rdzv-endpoint", "host:1234"], "c10d"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:1234", "--node-rank", "0"], "static"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:1234", "--rdzv-backend", "static"], "static"),
        (["--nnodes", "2", "--master-addr", "host"], "static"),
        (["--nnodes", "2:3", "--rdzv-endpoint", "host:1234", "--rdzv-backend", "etcd-v2"], "etcd-v2"),
    ],
)
def test_an_endpoint_for_several_nodes_is_one_of_c10d(line, backend):
    """torchrun's default, static, would make each of them the first."""
    config, _, _ = configure(parse([*line, "script.py"]))
    assert config.rdzv_backend == backend


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--monitor-interval", "inf"], "--monitor-interval inf"),
        (["--monitor-interval", "nan"], "--monitor-interval nan"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0"),
        (["--nproc-per-node", "9" * 20], "--nproc-per-node 99999"),
        (["--nnodes", "9" * 20], "--nnodes 99999"),
        (["--event-log-handler", "nope"], "--event-log-handler nope"),
        (["--no-python", ""], '--no-python ""'),
    ],
)
def test_a_value_with_which_torchs_agent_would_fail_is_named(words, said):
    with pytest.raises(ArgumentsError) as refused:
        configure(parse([*words, "script.py"]))
    assert str(refused.value).startswith(said)


def test_a_run_that_is_alone_takes_any_port_on_every_torch(monkeypatch):
    """Up to torch 2.6 at least torchrun's was 29500: a second run on the host failed."""

    def older():
        parser = torchrun.get_args_parser()
        parser.set_defaults(master_port=29500)
        return parser

    monkeypatch.setattr(options, "get_args_parser", older)
    assert build_parser().parse_args(["s.py"]).master_port is None
    assert build_parser().parse_args(["--master-port", "29500", "s.py"]).master_port == 29500
    config, _, _ = configure(parse(["s.py"]))
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "localhost:0")
