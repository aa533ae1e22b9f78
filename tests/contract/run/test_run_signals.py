"""How a run ends from outside: signals, and the launcher's own death. No orphan is ever left."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from kits.contract import runkit
from kits.contract.nodekit import free_port

ENDS = """
def ended(number, frame):
    tell("signal", number=number)
    sys.exit(0)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, ended)
tell("up")
hold()
"""
IGNORES = """
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
tell("up")
hold()
"""
NOTES = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda number, frame: tell("signal", number=number))
tell("up")
hold()
"""
SLOW = """
signal.signal(signal.SIGTERM, lambda number, frame: tell("signal", number=number))
tell("up")
hold()
"""
PLAIN = """
tell("up")
hold()
"""
STUBBORN_CHILD = """
import subprocess
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
tell("up", child=child.pid)
hold()
"""


def three(*more: str) -> list[str]:
    return ["--nproc-per-node", "3", "--max-restarts", "9", *more]


def reapers(run: runkit.Run) -> list[int]:
    """The programs that watch over this launcher's workers: its children."""
    found = []
    for pid in runkit.living():
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == run.pid and b"orphan_reaper.py" in line:
            found.append(pid)
    return found


def gone(run: runkit.Run, pids: list[int]) -> None:
    run.wait_for(lambda: not set(pids) & set(runkit.living()), f"the end of {pids}")


@pytest.mark.parametrize("restart", ["worker", "group"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_goes_to_the_workers_and_names_the_exit_code(tmp_path, name, restart):
    number = getattr(signal, name)
    with runkit.launched(tmp_path, ENDS, options=three("--restart", restart)) as run:
        run.wait_told("up", 3)
        run.signal(number)
        assert run.ended() == 128 + number
        assert {(t.rank, t.number) for t in run.told("signal")} == {(rank, number) for rank in range(3)}
        assert run.leftovers() == []
        assert len(run.told("up")) == 3, "a worker that was asked to end is not started again"
        assert "Traceback" not in run.text()


def test_the_users_own_list_of_signals(tmp_path):
    pytest.importorskip("torch")
    from torch.distributed.launcher.api import LaunchConfig

    if not hasattr(LaunchConfig(1, 1, 1), "signals_to_handle"):
        pytest.skip("this torch has no --signals-to-handle")
    options = three("--signals-to-handle", "SIGUSR1,SIGTERM")
    with runkit.launched(tmp_path, ENDS, options=options) as run:
        run.wait_told("up", 3)
        run.signal(signal.SIGUSR1)
        assert run.ended() == 128 + signal.SIGUSR1
        assert len(run.told("signal", number=signal.SIGUSR1)) == 3


def test_workers_that_ignore_it_are_killed_after_the_grace_period(tmp_path):
    with runkit.launched(tmp_path, IGNORES, options=three("--grace", "1")) as run:
        run.wait_told("up", 3)
        began = time.monotonic()
        run.signal(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM
        assert time.monotonic() - began >= 1
        assert run.leftovers() == []
        assert len(run.wait_line("event=stopped exitcode=-9")) == 3


@pytest.mark.parametrize("restart", ["worker", "group"])
def test_a_second_ctrl_c_kills_at_once(tmp_path, restart):
    with runkit.launched(tmp_path, NOTES, options=three("--grace", "500", "--restart", restart)) as run:
        run.wait_told("up", 3)
        run.signal(signal.SIGINT)
        run.wait_told("signal", 3)  # else the two would be one
        assert run.process.poll() is None
        run.signal(signal.SIGINT)
        assert run.ended() == 128 + signal.SIGINT
        assert run.leftovers() == []


SAVES = """
def save(number, frame):
    time.sleep(1)  # as a checkpoint takes
    tell("saved")
    sys.exit(0)

signal.signal(signal.SIGHUP, save)
tell("up")
hold()
"""


@pytest.mark.parametrize("restart", ["worker", "group"])
def test_the_end_of_a_terminal_is_one_signal(tmp_path, restart):
    """The shell sends SIGHUP, and so does the kernel a moment later."""
    with runkit.launched(tmp_path, SAVES, options=three("--restart", restart)) as run:
        run.wait_told("up", 3)
        run.signal(signal.SIGHUP)
        time.sleep(0.01)  # else the kernel makes one of them
        run.signal(signal.SIGHUP)
        assert run.ended() == 128 + signal.SIGHUP
        assert len(run.told("saved")) == 3
        assert run.leftovers() == []


def test_many_signals_leave_no_worker_of_a_group(tmp_path):
    """Also one that comes while torch's agent ends the workers, or has begun to start them."""
    with runkit.launched(tmp_path, NOTES, options=three("--grace", "500", "--restart", "group")) as run:
        run.wait_told("up", 3)
        while run.process.poll() is None:
            run.signal(signal.SIGTERM)
            time.sleep(0.02)
        assert run.leftovers() == []


def test_stopped_workers_end_too(tmp_path):
    with runkit.launched(tmp_path, PLAIN, options=three("--grace", "1")) as run:
        for told in run.wait_told("up", 3):
            os.kill(told.pid, signal.SIGSTOP)
        run.signal(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM
        assert run.leftovers() == []


def test_what_workers_started_ends_with_them(tmp_path):
    with runkit.launched(tmp_path, STUBBORN_CHILD, options=three("--grace", "30")) as run:
        children = [told.child for told in run.wait_told("up", 3)]
        run.signal(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM
        gone(run, children)
        assert run.leftovers() == []


def test_a_worker_that_waits_for_its_restart_is_not_started_any_more(tmp_path):
    script = textwrap.dedent("""
        tell("up")
        if _rank == 1:
            sys.exit(5)
        hold()
    """)
    with runkit.launched(
        tmp_path, script, options=three("--restart-backoff", "400", "--restart-backoff-max", "400")
    ) as run:
        run.wait_line("worker=1 .*event=restarting delay=400")
        run.signal(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM
        assert len(run.told("up", rank=1)) == 2


@pytest.mark.parametrize("restart", ["worker", "group"])
def test_no_orphans_when_the_launcher_is_killed(tmp_path, restart):
    with runkit.launched(tmp_path, ENDS, options=three("--restart", restart)) as run:
        run.wait_told("up", 3)
        run.signal(signal.SIGKILL)
        assert run.process.wait(runkit.PATIENCE) == -signal.SIGKILL
        assert run.leftovers() == []
        assert {(t.rank, t.number) for t in run.told("signal")} == {(r, signal.SIGTERM) for r in range(3)}


def test_no_orphans_that_ignore_it_or_were_started_by_workers(tmp_path):
    with runkit.launched(
        tmp_path, IGNORES.replace("hold()", "") + STUBBORN_CHILD, options=three("--grace", "1")
    ) as run:
        children = [told.child for told in run.wait_told("up", 6) if "child" in told]
        watcher = reapers(run)
        run.signal(signal.SIGKILL)
        gone(run, children)
        assert run.leftovers() == []
        gone(run, watcher)


def test_ranks_of_a_launcher_that_was_killed_run_on_another_node_only(tmp_path):
    (tmp_path / "worlds.toml").write_text('[roles]\nworker = 2\n[worlds.w]\nmembers = ["worker:*"]\n')
    endpoint = f"127.0.0.1:{free_port()}"

    def node(number):
        (folder := tmp_path / str(number)).mkdir()
        return runkit.launched(
            folder, SLOW,
            options=["--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, "--rdzv-id", "twice",
                     "--local-addr", "127.0.0.1", "--rdzv-conf", f"is_host={1 - number},last_call_timeout=1",
                     "--worlds", str(tmp_path / "worlds.toml"), "--grace", "600"],
        )  # fmt: skip

    with node(0) as first, node(1) as second:
        for run in (first, second):
            run.wait_line("event=node-joined")
        first.wait_for(lambda: first.told("up") or second.told("up"), "workers")
        killed, other = (first, second) if first.told("up") else (second, first)
        killed.wait_told("up", 2)
        killed.signal(signal.SIGKILL)
        assert {told.rank for told in other.wait_told("up", 2)} == {0, 1}
        assert killed.leftovers() == []
        assert killed.told("signal") == []
        other.say()
        assert other.ended() == 0


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_no_orphans_of_functions(tmp_path, method):
    path = runkit.script(tmp_path, PLAIN)
    with runkit.launched(
        tmp_path, path, options=["--nproc-per-node", "2", "--run-path", "--start-method", method]
    ) as run:
        run.wait_told("up", 2)
        run.signal(signal.SIGKILL)
        assert run.leftovers() == []


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_signal_ends_functions(tmp_path, method):
    path = runkit.script(tmp_path, PLAIN)
    with runkit.launched(
        tmp_path, path, options=["--nproc-per-node", "2", "--run-path", "--start-method", method]
    ) as run:
        run.wait_told("up", 2)
        run.signal(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM
        assert run.leftovers() == []
    assert "SIGKILL" not in run.text()


def test_ctrl_c_ends_functions(tmp_path):
    """torch's entry point catches KeyboardInterrupt: the process ends with 0, and returns no value."""
    path = runkit.script(tmp_path, PLAIN)
    with runkit.launched(tmp_path, path, options=["--nproc-per-node", "2", "--run-path"]) as run:
        run.wait_told("up", 2)
        began = time.monotonic()
        run.signal(signal.SIGINT)
        assert run.ended() == 128 + signal.SIGINT
        assert time.monotonic() - began < 25, "the grace period of 30 s was waited for"
        assert run.leftovers() == []
    assert "still there" not in run.text()


THREAD_STAYS = """
import threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=hold).start()
threading.Thread(target=lambda: (threading.main_thread().join(), tell("returned"))).start()
"""


def test_a_signal_ends_a_function_that_has_returned_and_whose_thread_runs_on(tmp_path):
    path = runkit.script(tmp_path, THREAD_STAYS)
    with runkit.launched(tmp_path, path, options=["--run-path", "--grace", "1"]) as run:
        run.wait_told("returned")
        began = time.monotonic()
        run.signal(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM, run.report()
        assert time.monotonic() - began < 15
        assert run.leftovers() == []


TELLS_ITS_THREADS = """
import atexit, sys, threading
names = lambda: sorted(each.name for each in threading.enumerate())
atexit.register(lambda: print("left:", *names(), file=sys.stderr, flush=True))
from multiworld.run.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_no_thread_is_left_in_torch_when_a_signal_has_ended_the_launcher(tmp_path):
    """One that comes back from torch after the interpreter has ended ends the process by SIGABRT."""
    command = [sys.executable, "-c", TELLS_ITS_THREADS, *three(), "{script}"]
    with runkit.launched(tmp_path, PLAIN, command=command) as run:
        run.wait_told("up", 3)
        run.signal(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM, run.report()
        (line,) = re.findall("^left: .*$", run.text(), re.MULTILINE)
        assert "MainThread" in line
        assert "KeepAlive" not in line


def test_the_guard_is_started_again_and_knows_all_workers(tmp_path):
    with runkit.launched(tmp_path, PLAIN, options=three()) as run:
        run.wait_told("up", 3)
        (first,) = reapers(run)
        os.kill(first, signal.SIGKILL)
        run.wait_line("the program that ends orphaned workers .* started again")  # it has the workers by then
        run.signal(signal.SIGKILL)
        assert run.leftovers() == []


FAILS_ONCE = """
tell("up")
if _attempt == 0 and _rank == 1:
    sys.exit(3)
"""
SAYS_ALOUD = """
import os, sys
from multiworld.run.main import main
from multiworld.run.workers.reaper_client import ReaperClient
plain = ReaperClient._say

def say(self, *lines):
    with open(os.environ["M8D_SAID"], "a") as file:
        file.writelines(line + chr(10) for line in lines)
    plain(self, *lines)

ReaperClient._say = say
sys.exit(main(sys.argv[1:]))
"""
"""The launcher, which writes down what it tells its orphan reaper."""


@pytest.mark.parametrize("restart", ["worker", "group"])
def test_the_guard_is_told_of_each_worker_that_is_gone(tmp_path, restart):
    """A number it still held would be somebody else's sooner or later."""
    said = tmp_path / "said"
    command = [sys.executable, "-c", SAYS_ALOUD, *three("--restart", restart), "{script}"]
    with runkit.launched(tmp_path, FAILS_ONCE, command=command, env={"M8D_SAID": str(said)}) as run:
        assert run.ended() == 0, run.report()
        workers = {told.pid for told in run.wait_told("up", 4)}
    words = [line.split() for line in said.read_text().splitlines()]
    started = {int(line[2]) for line in words if line[0] == "started"}
    assert started >= workers, "one that the restart ended before it was up is not in it"
    assert sorted(int(line[1]) for line in words if line[0] == "gone") == sorted(started)
    assert words[-1] == ["bye"]


def test_the_guard_lets_the_launchers_signals_be_the_launchers_business(tmp_path):
    """Whatever ends a whole session or container at once reaches the orphan reaper as well."""
    with runkit.launched(tmp_path, PLAIN, options=three()) as run:
        run.wait_told("up", 3)
        (guard,) = reapers(run)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(guard, number)
        run.signal(signal.SIGKILL)
        assert run.leftovers() == []
        gone(run, [guard])


def test_killed_while_workers_are_being_started_and_restarted(tmp_path):
    """At any moment: the launcher dies while workers come and go."""
    script = "tell('up')\nimport random\ntime.sleep(random.random() * 0.02)\nsys.exit(1)\n"
    options = ["--nproc-per-node", "4", "--max-restarts", "100000", "--restart-backoff", "0"]
    for moment in range(4):
        folder = tmp_path / str(moment)
        folder.mkdir()
        with runkit.launched(folder, script, options=options) as run:
            run.wait_told("up", 20 + moment)
            run.signal(signal.SIGKILL)
            assert run.leftovers() == []
            told = len(run.told())
            time.sleep(0.5)
            assert len(run.told()) == told


def test_a_process_in_the_middle_of_its_exec_counts_as_living(monkeypatch):
    """Its environment is empty for some microseconds: a look in that moment must not take it for nobody's."""
    answers = iter([b"", b"", b"MARK=1\0"])
    monkeypatch.setattr(runkit, "_read", lambda _, name: next(answers) if name == "environ" else b"")
    assert b"MARK=1" in runkit._environ(os.getpid())


def test_an_exec_that_ends_between_two_looks(monkeypatch):
    """The first finds no environment, the second arguments: only one more tells whose process it is."""
    answers = {"environ": iter([b"", b"MARK=1\0"]), "cmdline": iter([b"python\0"])}
    monkeypatch.setattr(runkit, "_read", lambda _, name: next(answers[name]))
    assert b"MARK=1" in runkit._environ(os.getpid())


def test_nothing_is_left_in_the_folder_of_sockets(tmp_path):
    with tempfile.TemporaryDirectory(prefix="m8d-") as short:  # a socket's path is at most 107 bytes long
        env = {"XDG_RUNTIME_DIR": short}
        sockets = Path(short) / "m8d-run"
        with runkit.launched(tmp_path, PLAIN, options=three(), env=env) as run:
            run.wait_told("up", 3)
            assert len(list(sockets.iterdir())) == 1
            run.say()
            assert run.ended() == 0
            assert list(sockets.iterdir()) == []


WHILE_IT_TELLS = """
import os, signal, sys
from multiworld.run import main
from multiworld.run.events import WorkerStarted
from multiworld.run.view.log import EventLog

tell = EventLog.__call__
started = []

def interrupted(event_log, event):
    if isinstance(event, WorkerStarted):
        started.append(event)
        if len(started) == 3:
            {how}
    tell(event_log, event)

EventLog.__call__ = interrupted
sys.exit(main.main(sys.argv[1:]))
"""
SIGNALLED = "os.kill(os.getpid(), signal.SIGTERM)"
SWALLOWED = f"""
            try:
                {SIGNALLED}
            except Exception as lost:
                print("lost:", lost)
"""


@pytest.mark.parametrize(
    "how", [SIGNALLED, SWALLOWED], ids=["in a listener", "in somebody's except Exception"]
)
def test_a_signal_is_not_lost_while_the_launcher_tells_what_happens(tmp_path, how):
    """torch's handler raises an Exception, wherever the launcher is: what is caught there must not be the end of it."""
    driver = tmp_path / "driver.py"
    driver.write_text(WHILE_IT_TELLS.format(how=how))
    command = [sys.executable, str(driver), *three("--restart", "group"), "{script}"]
    with runkit.launched(tmp_path, ENDS, command=command) as run:
        assert run.ended() == 128 + signal.SIGTERM
        assert run.leftovers() == []
        assert "Traceback" not in run.text()
        if how is SWALLOWED:
            assert "got signal" in run.text(), "torch's handler raised there"


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 128 + signal.SIGINT), ("SIGTERM", -signal.SIGTERM)])
def test_a_launcher_that_waits_for_other_nodes_can_be_ended(tmp_path, name, code):
    """There is no worker yet: SIGTERM ends it as it ends any program."""
    options = [
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--rdzv-id",
        "alone",
    ]
    with runkit.launched(tmp_path, PLAIN, options=options) as run:
        run.wait_line("event=run-started")
        run.wait_for(lambda: reapers(run) != [], "the launcher's parts")
        time.sleep(1)  # into the rendezvous
        run.signal(getattr(signal, name))
        assert run.ended() == code
        assert run.leftovers() == []
        assert run.told() == []


@pytest.mark.parametrize("handler", ["null", "console"])
def test_a_log_that_is_not_read_keeps_no_signal_from_the_workers(tmp_path, handler):
    """torch's agent logs that a signal came before it ends the workers, and a failed run has a report."""
    options = ["--standalone"]
    if handler != "null":
        api = pytest.importorskip("torch.distributed.launcher.api")
        if not hasattr(api.LaunchConfig(1, 1, 1), "event_log_handler"):
            pytest.skip("this torch has no --event-log-handler")
        options += ["--event-log-handler", handler]
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, sys, time\n"
        "def ended(*_):\n    print('got it', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, ended)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    command = [sys.executable, "-m", "multiworld.run", *options, str(script)]
    with os.fdopen(reader, "rb") as unread:
        with os.fdopen(writer, "wb") as err:
            process = subprocess.Popen(
                command,
                cwd=runkit.ROOT,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        with process:
            try:
                assert process.stdout is not None
                assert select.select([process.stdout], [], [], 60)[0], "its workers were not started"
                assert process.stdout.readline() == "up\n"
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 128 + signal.SIGTERM
                assert process.stdout.readline() == "got it\n"
            finally:
                process.kill()  # then its orphan reaper ends the worker
        assert unread.read(1) == b"x"
