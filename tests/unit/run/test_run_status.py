"""``m8d-run status``: finds the launchers of this user, waits for none of them long, and says what it found."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from kits.runstatekit import begun, killed, run_of
from kits.terminalkit import CODES, on_a_terminal

from multiworld.run.main import main as run_main
from multiworld.run.view.status import NONE, SILENT, Answer, ask_all, main

ROOT = Path(__file__).parents[3]
SNAPSHOT = {**run_of(*begun(), *killed(3)).snapshot(), "pending": {}}


@pytest.fixture
def root(monkeypatch):
    """The folder for launchers' folders; short, as a socket's path must be."""
    folder = tempfile.mkdtemp(prefix="st", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr("multiworld.run.control.sockets.roots", lambda: [Path(folder) / "m8d-run"])
    monkeypatch.setattr(
        "multiworld.run.view.status._TIMEOUT", 30.0
    )  # a busy machine is no launcher that hangs
    monkeypatch.setattr("multiworld.run.control.pending.pending_operations", lambda path, timeout: {})
    path = Path(folder) / "m8d-run"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(folder)


@contextmanager
def launcher(root: Path, name: str, *answers: object, slow: bool = False):
    """A launcher's socket that answers with these, one for each question; without any it accepts and is silent."""
    folder = root / name
    folder.mkdir(mode=0o700)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "control.sock"))
    server.listen()
    over, asked = threading.Event(), []

    def serve() -> None:
        for answer in answers:
            try:
                link, _ = server.accept()
            except OSError:  # nobody asked
                return
            with link:
                asked.append(link.recv(1000))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n"
                if slow:  # a byte now and then: each one alone comes in time
                    while not over.wait(0.3) and data:
                        try:
                            link.send(data[:1])
                        except OSError:
                            break
                        data = data[1:]
                else:
                    link.sendall(data)
        over.wait(60)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        server.close()
        assert not thread.is_alive()


def answer(**more: object) -> dict:
    return {"snapshot": {**SNAPSHOT, **more}}


def dead(root: Path, name: str) -> None:
    (root / name).mkdir(mode=0o700)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(root / name / "control.sock"))
    server.close()


def test_one_run_as_a_table(root, capsys):
    with launcher(root, "job7-1", answer()) as asked:
        assert main([]) == 0
    assert json.loads(asked[0]) == {"hello": "status"}
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0].startswith("run job7 · node alpha · seat 0 of 1 · up ")
    assert lines[3].split()[:3] == ["rank", "worker", "pid"]
    assert [line.split()[1] for line in lines[4:13]] == ["hub:0", *(f"worker:{at}" for at in range(8))]
    assert "w2 active 2" in lines[7]


def test_json_is_a_list_of_snapshots(root, capsys):
    with launcher(root, "a-1", answer()), launcher(root, "b-2", answer(run_id="other")):
        assert main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == [SNAPSHOT, {**SNAPSHOT, "run_id": "other"}]


def test_one_run_by_its_name(root, capsys):
    with launcher(root, "a-1", answer(), answer()), launcher(root, "b-2", answer(run_id="other"), answer()):
        assert main(["--json", "--run-id", "other"]) == 0
        assert [each["run_id"] for each in json.loads(capsys.readouterr().out)] == ["other"]
        assert main(["--run-id", "third"]) == NONE
    out, err = capsys.readouterr()
    assert (out, err) == ("", "m8d-run status: no launcher of run third runs on this host for this user\n")


def test_nothing_runs(root, capsys):
    dead(root, "killed-1")
    (root / "begins-2").mkdir()
    assert main([]) == NONE
    assert capsys.readouterr() == ("", "m8d-run status: no launcher runs on this host for this user\n")
    shutil.rmtree(root)
    assert main(["--json"]) == NONE
    assert json.loads(capsys.readouterr().out) == []


def test_one_that_hangs_does_not_hide_the_others(root, capsys, monkeypatch):
    monkeypatch.setattr("multiworld.run.view.status._TIMEOUT", 6.0)
    with launcher(root, "a-1", answer()), launcher(root, "hung-2"):
        assert main([]) == SILENT
    out, err = capsys.readouterr()
    assert out.startswith("run job7 ")
    assert (
        err == f"m8d-run status: {root}/hung-2/control.sock: no answer within 6 s: it is stopped, or hangs\n"
    )


def test_one_that_hangs_may_be_the_run_that_was_asked_for(root, capsys, monkeypatch):
    answers = [Answer("a", SNAPSHOT), Answer("b", None, "no answer")]
    monkeypatch.setattr("multiworld.run.view.status.ask_all", lambda paths, timeout, waits: answers)
    assert main(["--run-id", "job7"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["--run-id", "third"]) == SILENT
    assert capsys.readouterr() == ("", "m8d-run status: b: no answer\n")


@pytest.mark.parametrize("slow", [False, True])
def test_the_deadline_is_for_all_of_an_answer_and_for_all_launchers_at_once(root, slow):
    told = (answer(),) if slow else ()
    with launcher(root, "a", *told, slow=slow), launcher(root, "b", *told, slow=slow):
        paths = [root / name / "control.sock" for name in "ab"]
        began = time.monotonic()
        seen = ask_all(paths, timeout=1.0)
        # One after the other would be 2 s, without a deadline for all of it minutes.
        assert time.monotonic() - began < 30
    assert [each.fault for each in seen] == ["no answer within 1 s: it is stopped, or hangs"] * 2


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        (b"rubbish\n", "its answer is no snapshot: another version of multiworld?"),
        (b"[1]\n", "its answer is no snapshot: another version of multiworld?"),
        (b"\xff\xfe\n", "its answer is no snapshot: another version of multiworld?"),
        ({"snapshot": 3}, "its answer is no snapshot: another version of multiworld?"),
        ({"error": "no snapshot: boom"}, "no snapshot: boom"),
        ({"snapshot": {"version": 1, "run_id": 5}}, "its answer is no snapshot: KeyError: 'workers'"),
    ],
)
def test_what_is_no_snapshot(root, capsys, told, fault):
    with launcher(root, "a", told):
        assert main([]) == SILENT
    assert capsys.readouterr().err == f"m8d-run status: {root}/a/control.sock: {fault}\n"


def test_one_that_ends_while_it_is_asked_does_not_run(root):
    with launcher(root, "a", b""):
        assert main([]) == NONE


def test_a_snapshot_of_another_version(root, capsys):
    with launcher(root, "a", {"snapshot": {"version": 2, "run_id": "new"}}):
        assert main([]) == 0
    assert capsys.readouterr().out == "run new: its snapshot is of version 2; see it with --json\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_watching_ends_with_the_run(root, capsys, monkeypatch, form):
    monkeypatch.setattr("multiworld.run.view.status._EVERY", 0.05)
    with launcher(root, "a", answer(), answer(run_id="later"), b""):
        assert main(["--watch", *form]) == 0
    out = capsys.readouterr().out
    if form:
        assert [json.loads(line)[0]["run_id"] for line in out.splitlines()] == ["job7", "later"]
    else:
        assert out.index("run job7") < out.index("run later")


def test_watching_nothing(root, capsys):
    assert main(["--watch"]) == NONE
    assert "no launcher runs" in capsys.readouterr().err


def test_it_needs_neither_torch_nor_rich(root):
    script = (
        "import sys\nfrom multiworld.run.view import status\nstatus._TIMEOUT = 30.0\ncode = status.main(['--json', '--run-id', 'only-here'])\n"
        "assert not {'torch', 'rich', 'numpy', 'asyncio'} & set(sys.modules), sorted(sys.modules)\nsys.exit(code)"
    )
    with launcher(
        root, "a", answer(run_id="only-here")
    ):  # in that process the launchers of others are seen too
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "XDG_RUNTIME_DIR": str(root.parent)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{**SNAPSHOT, "run_id": "only-here"}]


@pytest.mark.parametrize("rich", [True, False])
def test_on_a_terminal_it_has_colours_where_rich_is_there(root, rich):
    without = "" if rich else "sys.modules['rich.console'] = None; "
    script = f"import sys; {without}from multiworld.run.view import status; status._TIMEOUT = 30.0; sys.exit(status.main(['--run-id', 'only-here']))"
    with launcher(root, "a", answer(run_id="only-here")):
        code, told = on_a_terminal(sys.executable, "-c", script, XDG_RUNTIME_DIR=str(root.parent))
    assert code == 0, told
    assert ("\x1b[" in told) == rich
    assert "run only-here · node alpha" in CODES.sub("", told)
    assert all(len(line) <= 100 for line in CODES.sub("", told).splitlines())


def waiting(name, since, *, idle=False):
    return {"since": since, "text": f"{name} #3: rank 0 waits; rank 1 is in no operation", "idle": idle}


def test_what_waits_is_shown_with_who_is_missing(root, capsys, monkeypatch):
    found = {"w0": [waiting("all_reduce", 5.0)], "w1": [waiting("recv", 1.0, idle=True)]}
    monkeypatch.setattr("multiworld.run.control.pending.pending_operations", lambda path, timeout: found)
    with launcher(root, "job7-1", answer(), answer()):
        assert main([]) == 0
        assert "\nw0: all_reduce #3: rank 0 waits; rank 1 is in no operation\n" in capsys.readouterr().out
        assert main(["--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["pending"] == {"w0": found["w0"]}, "what is idle is not told"


def test_only_the_longest_are_shown(root, capsys, monkeypatch):
    found = {f"w{i}": [waiting(f"op{i}", float(9 - i))] for i in range(9)}
    monkeypatch.setattr("multiworld.run.control.pending.pending_operations", lambda path, timeout: found)
    with launcher(root, "job7-1", answer()):
        assert main([]) == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if " waits; " in line] == [
        "w8",
        "w7",
        "w6",
        "w5",
        "w4",
    ]
    assert "\nand 4 operations more that wait\n" in out


def test_a_launcher_that_cannot_say_what_waits_is_shown_without(root, capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("multiworld.run.control.sockets.roots", lambda: [root])
    monkeypatch.setattr("multiworld.run.view.status._PENDING", 0.2)
    with launcher(root, "job7-1", answer()):  # of an earlier version: it does not answer the second question
        assert main([]) == 0
    assert capsys.readouterr().out.startswith("run job7 ")


@pytest.mark.parametrize("words", [["status"], ["retire", "job7", "worker:0"], ["web", "job7"]])
def test_a_launcher_that_is_not_asked_for_want_of_a_thread_may_be_there(words, root, capsys, monkeypatch):
    with launcher(root, "job7-1"):
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", no_thread)
            assert run_main(words) == SILENT
        assert "control.sock: not asked: can't start new thread" in capsys.readouterr().err


def no_thread(_):
    raise RuntimeError("can't start new thread")
