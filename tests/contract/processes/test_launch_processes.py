"""launch_subprocesses with real processes: results, failures, endings. Run as a program, it is one that launches."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from multiworld.errors import StoreBindError
from multiworld.launch import (
    ConfigError,
    LaunchError,
    MultiprocessConfig,
    ProcessExitedError,
    ProcessRaisedError,
    init_dist,
    launch_subprocesses,
    processes,
)

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0  # seconds; several processes load torch on a machine that may be busy
FOREVER = 600.0
METHODS = ("spawn", "forkserver")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path_factory):
    """No process, descriptor, variable or file of a launch outlives it."""
    others = ("TORCH_DISTRIBUTED_BACKEND", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
    for name in (*NAMES, *others):
        monkeypatch.delenv(name, raising=False)
    variables = dict(os.environ)
    tmp_path_factory.getbasetemp()  # of this run, not in the folder below, also where this file runs first
    multiprocessing.util.get_temp_dir()  # of this process, for good: not in the folder below
    with tempfile.TemporaryDirectory(
        prefix="m8d-"
    ) as folder:  # its own: others leave their files in the usual one
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        files = list(Path(folder).glob("pytorch-errorfile-*"))
    assert files == []
    assert multiprocessing.active_children() == []
    assert {name: os.environ.get(name) for name in NAMES} == {name: variables.get(name) for name in NAMES}
    assert [each for each in Path("/proc/self/fd").iterdir() if "m8d-launch" in _target(each)] == []


def _target(fd: Path) -> str:
    with contextlib.suppress(OSError):  # closed meanwhile
        return str(fd.readlink())
    return ""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(true, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def two(method: str = "forkserver", **more) -> MultiprocessConfig:
    return MultiprocessConfig(world_size=2, launch_method=method, **more)


# -- what the processes do; module-level, so that they can be sent -----------------------------------------------


def remember(cfg):
    os.environ["M8D_TEST_SETUP"] = str(cfg.rank)


def look(cfg, a, b=0):
    return {
        "cfg": cfg,
        "env": {name: os.environ.get(name) for name in NAMES},
        "setup": os.environ.get("M8D_TEST_SETUP"),
        "pid": os.getpid(),
        "args": (a, b),
        "tensor": torch.full((3,), float(cfg.rank)),
    }


def add_ranks(cfg):
    """Unmodified torch code: everything comes from the environment."""
    dist.init_process_group("gloo")
    tensor = torch.tensor([float(cfg.rank)])
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return tensor.item()


class Special(Exception):
    pass


def raise_in_rank_1(cfg, folder):
    if cfg.rank == 1:
        wait_for_files(folder, 1)
        try:
            raise KeyError("inner")  # noqa: TRY301
        except KeyError as exc:
            raise Special("boom\nsecond line") from exc
    stay(folder, cfg.rank)


def raise_and_take_long_to_end(cfg, folder):
    if cfg.rank == 0:
        # Called when the exception has been told, as the interpreter waits for its threads.
        multiprocessing.util.Finalize(None, end_late, (folder,), exitpriority=100)
        raise ValueError("the cause")
    wait_for_files(folder, 1)
    raise ConnectionError("rank 0 is lost")


def end_late(folder):
    (Path(folder) / "0").touch()
    time.sleep(FOREVER)


def end_rank_1(cfg, folder, how):
    if cfg.rank == 1:
        wait_for_files(folder, 1)
        if how < 0:
            os.kill(os.getpid(), -how)
            time.sleep(FOREVER)
        sys.exit(how)
    if how:
        stay(folder, cfg.rank)
    (Path(folder) / "0").touch()
    return "fine"


def wait_for_files(folder, count):
    wait_until(lambda: len(list(Path(folder).iterdir())) >= count, f"{count} others")


def stay(folder, rank):
    """Be hard to end: deaf to SIGTERM; and blocked in C++ as well."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = Path(folder) / f".{rank}"
    part.write_text(str(os.getpid()))
    part.rename(Path(folder) / str(rank))
    block_in_c()


def block_in_c():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.wait(["never"], timedelta(seconds=FOREVER))


def stop_myself(cfg, folder):
    if cfg.rank == 0:
        (Path(folder) / "0").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(FOREVER)
    wait_for_files(folder, 1)
    pid = int((Path(folder) / "0").read_text() or 0)
    wait_until(lambda: _state(pid) == "T", "rank 0 stands still")
    raise ValueError("now")


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def return_a_function(cfg):
    return lambda: cfg


# -- results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_results_by_rank(method):
    first, second = launch_subprocesses(look, two(method), remember, 0, 5, b="x")
    assert [first["cfg"].rank, second["cfg"].rank] == [0, 1]
    assert [first["env"]["RANK"], second["env"]["RANK"]] == ["0", "1"]
    assert second["env"] == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(second["cfg"].master_port),
    }  # fmt: skip
    assert [first["setup"], second["setup"]] == ["0", "1"]
    assert first["args"] == (5, "x")
    assert len({os.getpid(), first["pid"], second["pid"]}) == 3
    second["tensor"] += 1  # a copy: it is ours
    assert second["tensor"].tolist() == [2.0] * 3


@pytest.mark.parametrize("method", METHODS)
def test_unmodified_code_finds_its_group(method):
    assert launch_subprocesses(add_ranks, MultiprocessConfig(world_size=3, launch_method=method)) == [3.0] * 3


def test_one_process_runs_in_place():
    (seen,) = launch_subprocesses(look, MultiprocessConfig(), remember, 0, 1)
    assert seen["pid"] == os.getpid()
    assert seen["env"]["WORLD_SIZE"] == "1"
    assert launch_subprocesses(add_ranks, MultiprocessConfig()) == [0.0]
    os.environ.pop("M8D_TEST_SETUP")
    with pytest.raises(ZeroDivisionError):
        launch_subprocesses(lambda cfg: 1 / cfg.rank, MultiprocessConfig())


def test_a_worker_of_torchrun_runs_in_place(monkeypatch):
    with monkeypatch.context() as started:
        for name, value in zip(NAMES, ("3", "1", "4", "2", "10.0.0.1", "29500"), strict=True):
            started.setenv(name, value)
        (seen,) = launch_subprocesses(look, MultiprocessConfig(), None, 2, 1)
        assert seen["pid"] == os.getpid()
        assert (seen["cfg"].rank, seen["cfg"].world_size) == (3, 4)
        with pytest.raises(ConfigError, match="WORLD_SIZE=4"):
            launch_subprocesses(look, two())


def test_the_port_is_bound_by_the_launch_and_then_free():
    seen = launch_subprocesses(look, two(), None, 0, 1)
    port = seen[0]["cfg"].master_port
    assert 0 < port == seen[1]["cfg"].master_port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_port_that_somebody_else_has():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(StoreBindError, match=str(other.getsockname()[1])):
            launch_subprocesses(look, two(master_port=other.getsockname()[1]), None, 0, 1)
    with pytest.raises(StoreBindError, match=r"192\.0\.2\.1"):
        launch_subprocesses(look, two(master_addr="192.0.2.1"), None, 0, 1)


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_is_raised_in_the_parent_and_the_others_end(method, tmp_path):
    with pytest.raises(ProcessRaisedError) as caught:
        launch_subprocesses(raise_in_rank_1, two(method, grace=0.5), None, 0, str(tmp_path))
    error = caught.value
    assert (error.rank, error.local_rank, error.exit_code) == (1, 1, 1)
    assert error.type_name.endswith("Special")
    assert error.message == "boom\nsecond line"
    assert re.search(
        r"KeyError: 'inner'\n.*direct cause.*in raise_in_rank_1\n.*Special: boom", str(error), re.DOTALL
    )
    assert gone(int((tmp_path / "0").read_text()))


def test_the_first_exception_is_raised_also_of_a_process_that_takes_longer_to_end(tmp_path):
    with pytest.raises(ProcessRaisedError, match="Rank 0 raised ValueError: the cause") as caught:
        launch_subprocesses(raise_and_take_long_to_end, two(), None, 0, str(tmp_path))
    assert (caught.value.rank, caught.value.exit_code) == (0, 1)
    assert "in raise_and_take_long_to_end" in caught.value.traceback
    assert caught.value.also == ("rank 1: ConnectionError: rank 0 is lost",)


@pytest.mark.parametrize(
    ("method", "how"),
    [("spawn", -signal.SIGKILL), ("spawn", 3), ("forkserver", -signal.SIGSEGV), ("forkserver", 3)],
)
def test_a_process_that_just_ends(method, how, tmp_path):
    with pytest.raises(ProcessExitedError) as caught:
        launch_subprocesses(end_rank_1, two(method, grace=0.5), None, 0, str(tmp_path), how)
    assert (caught.value.rank, caught.value.exit_code, caught.value.began) == (1, how, True)
    assert caught.value.signal_name == (signal.Signals(-how).name if how < 0 else "")
    assert gone(int((tmp_path / "0").read_text()))


@pytest.fixture
def ignored():
    """SIGCHLD is ignored, as what a Perl daemon starts has it."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("ignored")
def test_where_sigchld_is_ignored(tmp_path):
    with pytest.raises(ProcessExitedError) as caught:
        launch_subprocesses(end_rank_1, two(grace=0.5), None, 0, str(tmp_path), 3)
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    with ThreadPoolExecutor(1) as threads, pytest.raises(LaunchError, match="while SIGCHLD is ignored"):
        threads.submit(launch_subprocesses, end_rank_1, two(), None, 0, str(tmp_path), 0).result(PATIENCE)


@pytest.fixture
def reaped():
    """A handler of SIGCHLD waits for any child, as that of a container's first process does."""

    def reap(*_):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    before = signal.signal(signal.SIGCHLD, reap)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("reaped")
def test_where_another_part_of_the_program_takes_the_exit_codes(tmp_path):
    first, second = launch_subprocesses(look, two("spawn"), remember, 0, 5, b="x")
    assert [first["cfg"].rank, second["cfg"].rank] == [0, 1]
    for each in ("raise", "exit"):
        (tmp_path / each).mkdir()
    with pytest.raises(ProcessRaisedError, match="boom"):
        launch_subprocesses(raise_in_rank_1, two("spawn", grace=0.5), None, 0, str(tmp_path / "raise"))
    with pytest.raises(LaunchError, match=r"Rank 1 .* exit code was taken"):
        launch_subprocesses(end_rank_1, two("spawn", grace=0.5), None, 0, str(tmp_path / "exit"), 3)


def test_sys_exit_0_is_a_good_end_without_a_result(tmp_path):
    assert launch_subprocesses(end_rank_1, two(), None, 0, str(tmp_path), 0) == ["fine", None]


def test_a_process_that_stands_still_is_ended_too(tmp_path):
    with pytest.raises(ProcessRaisedError, match="ValueError: now"):
        launch_subprocesses(stop_myself, two(grace=0.5), None, 0, str(tmp_path))
    assert gone(int((tmp_path / "0").read_text()))


def test_what_cannot_be_sent_is_said():
    with pytest.raises(LaunchError, match="could not be started") as caught:
        launch_subprocesses(lambda cfg: cfg, two())
    assert "functions of a module" in str(caught.value)
    with pytest.raises(ProcessRaisedError, match="its result cannot be sent to the parent"):
        launch_subprocesses(return_a_function, two())


# -- as a program: Ctrl-C, its end, several hosts ----------------------------------------------------------------


def told(cfg, line=""):
    # print() writes a line and its end one after the other where PYTHONUNBUFFERED is set: those of two processes mix.
    sys.stdout.write(f"rank {cfg.rank} pid {os.getpid()} {line}\n")
    sys.stdout.flush()


def wait_in_python(cfg):
    try:
        told(cfg)
        time.sleep(FOREVER)
    finally:
        told(cfg, "unwound")


def wait_in_c(cfg):
    told(cfg)
    block_in_c()


def sum_of_all(cfg):
    tensor = torch.tensor([cfg.rank])
    dist.all_reduce(tensor)
    told(cfg, f"sum {tensor.item()}")
    dist.barrier()
    dist.destroy_process_group()


def main(case: str, method: str, *more: str) -> int:
    if case == "hosts":
        cfg = MultiprocessConfig(
            world_size=3, local_world_size=int(more[2]), launch_method=method, master_addr="127.0.0.1",
            master_port=int(more[0]),
        )  # fmt: skip
        launch_subprocesses(sum_of_all, cfg, partial(init_dist, timeout=PATIENCE), int(more[1]))
        return 0
    processes._UNWINDING = float(more[0])  # a stalled machine needs longer than a person at a terminal waits
    try:
        launch_subprocesses({"python": wait_in_python, "c": wait_in_c}[case], two(method))
    except KeyboardInterrupt:
        print("interrupted", flush=True)  # noqa: T201
        return 130
    return 0


@pytest.fixture
def program():
    """Start this file as a program; whoever it started is gone afterwards."""
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: object, before: str = "") -> subprocess.Popen[str]:
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, *map(str, arguments)]
        made.append(
            subprocess.Popen(
                ["/bin/sh", "-c", f'{before} exec "$@"', "sh", *command] if before else command,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )
        )  # fmt: skip
        return made[-1]

    yield start
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its processes are in its group
        process.communicate(timeout=PATIENCE)


def pids(process) -> dict[int, int]:
    found: dict[int, int] = {}
    while len(found) < 2:
        line = process.stdout.readline()
        assert line, process.communicate(timeout=PATIENCE)
        if match := re.match(r"rank (\d) pid (\d+)", line):
            found[int(match[1])] = int(match[2])
    return found


# Each two of the three with each other; and what unwinds by itself with both methods.
@pytest.mark.parametrize(
    ("method", "case", "everyone"),
    [
        ("spawn", "python", True),
        ("spawn", "c", False),
        ("forkserver", "python", False),
        ("forkserver", "c", True),
        ("forkserver", "python", True),
    ],
)
def test_ctrl_c_ends_all_quietly(program, method, case, everyone):
    process = program(case, method, PATIENCE / 2 if everyone and case == "python" else 0.5)
    children = pids(process)
    (os.killpg if everyone else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert out.splitlines()[-1] == "interrupted"
    assert err == ""
    assert all(gone(pid) for pid in children.values())
    if everyone and case == "python":
        assert out.count("unwound") == 2


@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_while_they_start_is_quiet(program, method):
    process = program("python", method, 0.5)
    # With the parent and multiprocessing's tracker; or a forkserver, which must be up: it is Python's own.
    enough = 3 if method == "spawn" else 4
    wait_until(lambda: group_size(process.pid) >= enough or process.poll() is not None, "processes begin")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert out.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err


def group_size(leader: int) -> int:
    found = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit():
                found += int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == leader
    return found


@pytest.mark.parametrize(("method", "case"), [("spawn", "c"), ("forkserver", "python"), ("forkserver", "c")])
def test_no_orphans_when_the_parent_is_killed(program, method, case):
    """Started as a shell's background job is: deaf to SIGINT, which torch would send its processes."""
    process = program(case, method, 0.5, before="trap '' INT;")
    children = pids(process)
    process.kill()
    wait_until(lambda: all(gone(pid) for pid in children.values()), f"orphans {children}")
    process.wait(PATIENCE)


def test_two_hosts_with_a_port_that_is_given(program):
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        hosts = [program("hosts", "spawn", port, 0, 2), program("hosts", "spawn", port, 2, 1)]
        outputs = [each.communicate(timeout=PATIENCE) for each in hosts]
    assert [each.returncode for each in hosts] == [0, 0], outputs
    assert sorted(re.findall(r"rank (\d) pid \d+ sum 3", outputs[0][0] + outputs[1][0])) == ["0", "1", "2"]


def test_a_script_without_a_guard_is_told(program, tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from multiworld.launch import *\nfrom test_launch_processes import told\n"
        "launch_subprocesses(told, MultiprocessConfig(world_size=2))\n"
    )
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": path}, timeout=PATIENCE, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ended with exit code 1 before it reached the function" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
