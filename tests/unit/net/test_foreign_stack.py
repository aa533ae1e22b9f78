"""The stacks of another process, by py-spy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from multiworld._net import foreign_stack as module
from multiworld._net.foreign_stack import foreign_stack

PROGRAM = """
import time
def here_it_stands():
    print("stands", flush=True)
    time.sleep(60)
here_it_stands()
"""


def test_where_another_process_stands_without_its_command_line():
    with subprocess.Popen([sys.executable, "-c", PROGRAM, "--secret"], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"stands\n"
            found = foreign_stack(other.pid)
        finally:
            other.kill()
    assert found.startswith("Thread ")
    assert "here_it_stands" in found
    assert "--secret" not in found
    assert found == found.rstrip()


def test_a_process_that_is_gone():
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait()
    assert foreign_stack(other.pid) == ""


@pytest.fixture
def instead(tmp_path, monkeypatch):
    """A program in py-spy's place."""

    def put(script):
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("printf 'Process 1: x --secret\\n\\nThread 1 (idle)\\n    f (a.py:1)\\n'", "Thread 1 (idle)\n    f (a.py:1)"),
        ("printf 'Process 1\\n\\nThread 1\\n'; exit 1", ""),
        ("printf 'no threads\\n'", ""),
        ("printf '\\nThread \\377\\n'", "Thread \ufffd"),
    ],
)  # fmt: skip
def test_what_it_says(instead, script, found):
    instead(script)
    assert foreign_stack(1) == found


def test_it_is_asked_again_where_what_it_read_has_changed(instead, tmp_path):
    instead(f"printf x >> {tmp_path}/tried; test $(wc -c < {tmp_path}/tried) = 3 && printf '\\nThread 1\\n'")
    assert foreign_stack(1) == "Thread 1"
    assert (tmp_path / "tried").read_text() == "xxx"


def test_one_that_does_not_end_or_cannot_be_run(instead, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS", 0.1)
    instead("exec sleep 60")
    assert foreign_stack(1) == ""
    (tmp_path / "py-spy").write_bytes(b"\x7fELF no program")
    assert foreign_stack(1) == ""


def test_none_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert foreign_stack(1) == ""
    monkeypatch.setattr(sys, "executable", None)
    assert foreign_stack(1) == ""
