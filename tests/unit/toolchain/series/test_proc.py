from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from m8d_build import proc
from m8d_build.errors import CommandFailed, DiskFull, PrerequisiteMissing
from m8d_build.files.disk import needs_room


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_output_is_returned_without_a_log() -> None:
    assert proc.run(python("print('hello')"), what="say hello").stdout == "hello\n"


def test_output_goes_to_the_log_with_the_command_before_it(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    finished = proc.run(
        python("import sys; print('out'); print('err', file=sys.stderr)"), what="write", log=log
    )
    assert finished.stdout == ""
    text = log.read_text()
    assert text.startswith(f"$ {sys.executable}")
    assert {"out", "err"} <= set(text.split())


def test_a_folder_whose_name_is_not_utf8_is_logged_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"o\xff")
    folder.mkdir()
    proc.run(["ls", folder], what="list", log=folder / "log")
    assert os.fsencode(f"$ ls {folder}\n") in (folder / "log").read_bytes()


def test_a_failure_carries_status_log_and_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit(7)"
    with pytest.raises(CommandFailed) as caught:
        proc.run(python(code), what="count", log=log, next_step="Look at the log")
    assert "could not count" in caught.value.value
    assert "exited with 7" in caught.value.value
    assert caught.value.log == log
    assert caught.value.tail.splitlines()[-1] == "line 99"
    assert len(caught.value.tail.splitlines()) == proc.TAIL_LINES
    assert caught.value.next_step == "Look at the log"


def test_the_last_lines_are_those_of_this_run_not_of_one_before(tmp_path: Path) -> None:
    """That a disk was full yesterday does not make another failure one of the disk."""
    log = tmp_path / "x.log"
    with pytest.raises(DiskFull), needs_room(tmp_path, "counting"):
        proc.run(python("raise SystemExit('No space left on device')"), what="count", log=log)
    with pytest.raises(CommandFailed, match="exited") as caught, needs_room(tmp_path, "counting"):
        proc.run(python("raise SystemExit('Killed')"), what="count", log=log)
    assert caught.value.tail.splitlines()[1:] == ["Killed"]
    with pytest.raises(CommandFailed, match="within") as caught, needs_room(tmp_path, "waiting"):
        proc.run(["sleep", "600"], what="wait", log=log, timeout=0.5)
    assert caught.value.tail == "$ sleep 600"


def test_a_signal_is_named() -> None:
    with pytest.raises(CommandFailed, match="ended by SIGKILL"):
        proc.run(python("import os; os.kill(os.getpid(), 9)"), what="die")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(CommandFailed, match="no-such-program"):
        proc.run(["no-such-program"], what="run it")


def test_past_the_deadline_the_program_and_its_children_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # A shell, which has started its child long before its time is over.
    code = f"sleep 600 & echo $! > {pid_file}; sleep 600"
    began = time.monotonic()
    with pytest.raises(CommandFailed, match="within 3 s"):
        proc.run(["sh", "-c", code], what="sleep", timeout=3)
    assert time.monotonic() - began < 60
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


def test_children_that_do_not_hear_of_the_end_are_ended_with_the_program(tmp_path: Path) -> None:
    """One that is stopped, as a test may leave it, and one that ignores SIGTERM."""
    code = f"""
sleep 300 & stopped=$!; kill -STOP $stopped
(trap '' TERM; sleep 300) & deaf=$!
echo $stopped $deaf > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; exec sleep 300
"""
    with pytest.raises(CommandFailed, match="within 3 s"):
        proc.run(["bash", "-c", code], what="sleep", timeout=3)
    deadline = time.monotonic() + 30
    children = [int(each) for each in (tmp_path / "pids").read_text().split()]
    while time.monotonic() < deadline and any(map(_runs, children)):
        time.sleep(0.05)
    assert not any(map(_runs, children))


def _runs(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_signal_that_comes_while_a_program_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Popen is broken off where it waits for the program, and says nothing of its process."""
    started = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self.pid)
            arrive = signal.getsignal(signal.SIGTERM)
            assert callable(arrive)
            arrive(signal.SIGTERM, None)

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Popen)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            proc.run(["sleep", "300"], what="sleep")
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not _runs(started[0])


def test_variables_are_set_on_top_of_ours() -> None:
    shown = proc.run(
        python("import os; print(os.environ['M8D_X'], 'PATH' in os.environ)"), what="look", env={"M8D_X": "1"}
    )
    assert shown.stdout.split() == ["1", str("PATH" in os.environ)]


def test_nothing_is_read_from_our_standard_input() -> None:
    assert proc.run(python("import sys; print(repr(sys.stdin.read()))"), what="read").stdout == "''\n"


def test_a_missing_tool_says_what_it_is_for() -> None:
    with pytest.raises(PrerequisiteMissing) as caught:
        proc.which("no-such-tool", why="to read tea leaves", next_step="Install it")
    assert "no-such-tool" in caught.value.value
    assert "tea leaves" in caught.value.rule
    assert proc.which("sh", why="to test", next_step="")


def test_the_tail_of_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert proc.tail_of(tmp_path / "no.log") == ""
    assert proc.tail_of(None) == ""


def test_an_interrupt_that_left_the_lock_of_a_process_taken_does_not_hold_its_end_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C between the lines of `Popen.wait` that take its lock and that see to its release."""
    monkeypatch.setattr(proc, "ENDING", 0.2)
    process = proc._start(["sleep", "300"], None, os.environ, None)
    process._waitpid_lock.acquire()
    began = time.monotonic()
    proc._end(process)
    assert time.monotonic() - began < 30
    process._waitpid_lock.release()
    assert process.wait(timeout=30) == -signal.SIGTERM
    for stream in (process.stdout, process.stderr):
        stream.close()
