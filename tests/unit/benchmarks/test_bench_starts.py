"""What the part starts does with a launcher that dies, or does not end."""

from __future__ import annotations

import argparse
import json
import socket
import time

import pytest

from benchmarks.starts import launched
from benchmarks.starts.launched import WORKERS, Launched


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    """A shell script in the launcher's place."""

    def made(script: str) -> Launched:
        path = tmp_path / "launcher"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setattr(launched, "sys", argparse.Namespace(executable=str(path)))
        return Launched([])

    return made


def test_a_launcher_that_has_ended_is_not_waited_for(launcher):
    with launcher("echo no such role; exit 3") as run:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="m8d-run has ended with 3:\nno such role"):
            run.whole()
        assert time.monotonic() - began < launched.PATIENCE / 4


def test_workers_that_say_nothing_are_not_waited_for_in_silence(launcher, monkeypatch):
    monkeypatch.setattr(launched, "PATIENCE", 0.0)
    with (
        launcher("exec sleep 600") as run,
        pytest.raises(TimeoutError, match="nothing was heard of the workers for 0 s"),
    ):
        run.whole()


def test_what_workers_have_told_is_heard(launcher):
    with launcher("exec sleep 600") as run, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.connect(run._socket.getsockname())
        for rank in range(WORKERS):
            told.send(json.dumps({"name": "whole", "rank": rank, "pid": 1, "at": 2.0, "cpu": 0.1}).encode())
        assert run.whole() == {rank: {"at": 2.0} for rank in range(WORKERS)}


def test_a_launcher_that_does_not_end_is_killed(launcher, monkeypatch):
    monkeypatch.setattr(launched, "_END", 1.0)
    with launcher("trap '' TERM; echo ready; exec sleep 600") as run:
        end = time.monotonic() + 30.0
        while not run._log.read_text() and time.monotonic() < end:
            time.sleep(0.01)
    assert run._process.poll() == -9
    assert run._socket.fileno() == -1
    assert not run._log.exists()
