"""``m8d-run scale`` and ``retire``: from the command line to the launcher's loop, and what a worker hears."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kits.meetkit import until

from multiworld._generation.background_release import releaser
from multiworld._net.launcher_connection import ControlClient
from multiworld.events import State
from multiworld.launched.retirement import Retirement
from multiworld.run.control import commands
from multiworld.run.control.server import ControlServer
from multiworld.run.events import EventBus, StateProgress
from multiworld.run.main import main
from multiworld.run.view.status import NONE, SILENT

PATIENCE = 60.0
ROOT = Path(__file__).parents[3]


def soon():
    return time.monotonic() + PATIENCE


class Served:
    """A launcher's control server; `heard` has the commands."""

    def __init__(self, folder, run_id, command=True, pid=1):
        self.heard, self.seen, self.waits = [], [], []
        self.reply = {"done": ["starts a:1"]}
        bus = EventBus()
        bus.subscribe(self.seen.append)
        self.server = ControlServer(
            str(folder / f"{run_id}-{pid}" / "control.sock"), None, bus, lambda: {"version": 1, "run_id": run_id},
            store=str, command=self._command if command else None,
        )  # fmt: skip
        self.server.start()

    def _command(self, said, answer, waits):
        assert waits()
        self.heard.append(said)
        self.waits.append(waits)
        if self.reply is not None:
            threading.Thread(target=answer, args=(self.reply,)).start()  # as the launcher's loop does


@pytest.fixture
def folder(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="m8d-") as made:
        monkeypatch.setattr("multiworld.run.control.sockets.roots", lambda: [Path(made)])
        monkeypatch.setattr(commands, "_FINDING", PATIENCE)
        yield Path(made)


@contextlib.contextmanager
def served(folder, run_id="job-7", **more):
    made = Served(folder, run_id, **more)
    try:
        yield made
    finally:
        made.server.close()


def test_a_command_reaches_the_launcher(folder, capsys):
    with served(folder) as run:
        assert main(["scale", "job", "--workers", "3", "--policy", "oldest"]) == 0
        assert main(["retire", "job-7", "trainer:1", "--drain", "5"]) == 0
        run.reply = {"done": []}
        assert main(["scale", "job-7", "--world", "w", "--size", "2"]) == 0
        assert run.heard == [
            {"workers": 3, "policy": "oldest", "drain": 60.0},
            {"worker": "trainer:1", "drain": 5.0},
            {"world": "w", "size": 2, "policy": "newest", "drain": 60.0},
        ]
        assert capsys.readouterr().out == "starts a:1\nstarts a:1\nnothing to do\n"


def test_what_stands_against_it(folder, capsys, monkeypatch):
    assert main(["scale", "job-7", "--workers", "3"]) == NONE
    with served(folder) as run, served(folder, "job-8", command=False):
        assert main(["scale", "job", "--workers", "3"]) == commands.REFUSED
        assert main(["scale", "job-8", "--workers", "3"]) == commands.REFUSED
        run.reply = {"error": "no. Rule"}
        assert main(["scale", "job-7", "--workers", "3"]) == commands.REFUSED
        said = capsys.readouterr().err
        for words in (
            "no launcher of run job-7",
            "2 launchers here have a run job",
            "restarts as a group",
            "no. Rule",
        ):
            assert words in said
        run.reply = None
        monkeypatch.setattr(commands, "_ANSWER", 0.1)
        assert main(["scale", "job-7", "--workers", "3"]) == SILENT
        assert not run.waits[-1](), "the command has given up"


def test_two_launchers_of_one_run(folder, capsys):
    """Two nodes of a run on one host."""
    with served(folder, pid=4711) as one, served(folder, pid=4712) as other:
        assert main(["retire", "job-7", "1"]) == commands.REFUSED
        said = capsys.readouterr().err
        assert "2 launchers here have a run job-7: job-7 (job-7-4711), job-7 (job-7-4712)" in said
        assert main(["retire", "job-7-4711", "1"]) == 0
        assert (len(one.heard), len(other.heard)) == (1, 0)
        assert main(["retire", "4712", "1"]) == 0
        assert (len(one.heard), len(other.heard)) == (1, 1)


@pytest.mark.parametrize(
    "words",
    [
        [], ["job"], ["job", "--workers", "2", "--world", "w"], ["job", "--world", "w"], ["job", "--workers", "x"],
        ["job", "--workers", "2", "--size", "2"], ["job", "--world", "w", "--size", "2", "--role", "r"],
        ["job", "--workers", "2", "--policy", "best"],
    ],
)  # fmt: skip
def test_a_wrong_command_line(words):
    with pytest.raises(SystemExit) as caught:
        main(["scale", *words])
    assert caught.value.code == 2


def test_a_worker_hears_that_it_retires(folder):
    with served(folder) as run:
        heard = []
        client = ControlClient(run.server.path, deadline=soon(), retired=lambda: heard.append("first"))
        client.hello({"hello": "worker", "rank": 1, "pid": 1}, deadline=soon())
        run.server.retire([0, 1])
        until(lambda: heard == ["first"])
        client.report({"world": "w", "received": 3, "total": 9})
        until(lambda: run.seen)
        assert isinstance(run.seen[0], StateProgress)
        assert (run.seen[0].rank, run.seen[0].received, run.seen[0].total) == (1, 3, 9)
        client.close()
        # One that was told of before it connected; the process after it is a new one.
        late = ControlClient(run.server.path, deadline=soon(), retired=lambda: heard.append("late"))
        late.hello({"hello": "worker", "rank": 0, "pid": 2}, deadline=soon())
        until(lambda: heard == ["first", "late"])
        late.close()
        run.server.retire([])
        other = ControlClient(run.server.path, deadline=soon(), retired=lambda: heard.append("new"))
        other.hello({"hello": "worker", "rank": 0, "pid": 3}, deadline=soon())
        assert other.ask("worlds", deadline=soon()) is not None
        other.close()
        assert heard == ["first", "late"]


def test_worlds_of_a_range_are_left_in_each_generation(monkeypatch):
    left = []

    def handle(name, assigned):
        return SimpleNamespace(
            generation=1,
            state=State.ACTIVE,
            _plan=SimpleNamespace(assigned=assigned),
            leave=lambda: left.append(name),
        )

    found = {"range": handle("range", True), "fixed": handle("fixed", False)}
    monkeypatch.setattr("multiworld.launched.retirement.worlds", lambda: found)
    retirement = Retirement()
    assert not retirement.begun
    retirement.begin()
    retirement.begin()
    assert retirement.begun
    until(lambda: left == ["range"])
    found["range"].generation = 2
    retirement._news.set()
    until(lambda: left == ["range", "range"])
    found.clear()


def test_a_worker_without_a_thread_retires_when_there_is_one(monkeypatch):
    names, left, start = [], [], threading.Thread.start

    def starting(thread):
        names.append(thread.name)
        if names == ["m8d-retire"]:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    retirement = Retirement()
    monkeypatch.setattr(retirement, "_leave", lambda: left.append(True))
    retirement.begin()
    assert retirement.begun
    until(lambda: left)
    assert names.count("m8d-retire") == 2
    assert releaser.stop(time.monotonic() + PATIENCE)


@pytest.mark.parametrize(
    "command",
    [
        "multiworld.run --version",
        "multiworld doctor --json",
        "multiworld post-setup --check",
        "multiworld.run status",
    ],
)
@pytest.mark.parametrize("closed", ["its reader is gone", "it was never open"])
def test_a_command_whose_output_no_program_reads_ends_without_a_traceback(command, closed):
    reader, writer = os.pipe()
    os.close(reader)
    never = ["sh", "-c", 'exec "$@" >&-', "sh"] if "never" in closed else []
    run = subprocess.run(
        [*never, sys.executable, "-m", *command.split()],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=5 * PATIENCE, cwd=ROOT, check=False,
    )  # fmt: skip
    os.close(writer)
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr
    assert run.returncode < 120, run
