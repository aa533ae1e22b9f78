"""What the guard of a launcher's workers makes of what it hears."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from multiworld.run.workers import reaper_client
from multiworld.run.workers.orphan_reaper import OrphanReaper, start_time
from multiworld.run.workers.reaper_client import ReaperClient


def test_what_is_gone_is_forgotten_with_its_handle():
    reaper = OrphanReaper(30.0)
    pid = os.getpid()
    before = len([*Path("/proc/self/fd").iterdir()])
    reaper.hear(f"starting t1\nstarting t2\nstarted t1 {pid} {start_time(pid)} 0\n".encode())
    assert (reaper.starting, reaper.workers) == ({"t2"}, {pid: (start_time(pid), False)})
    reaper.hear(f"gone {pid}\nbye".encode())
    assert (reaper.workers, reaper.bye) == ({}, False)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    reaper.hear(b"\nand what a newer launcher says\n")
    assert reaper.bye


def test_a_number_that_is_anothers_now_is_not_signalled():
    reaper = OrphanReaper(30.0)
    pid = os.getpid()
    reaper.hear(f"started t1 {pid} {start_time(pid) - 1} 0\n".encode())
    reaper.end_all()  # this process goes on


def test_a_guard_that_cannot_be_started_again_is_tried_later(monkeypatch):
    """No descriptor, or no process, is left when it dies: the run goes on."""
    now = [0.0]
    client = ReaperClient(1.0, lambda: now[0])
    try:
        assert client._process is not None
        client._process.kill()
        client._process.wait()

        def refuse(*_args, **_options):
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(reaper_client.subprocess, "Popen", refuse)
            now[0] = 5.0
            assert not client.check()
            assert not client.check()
        now[0] = 5.5
        assert not client.check()
        now[0] = 6.5
        assert client.check()
        assert client.pid is not None
    finally:
        client.close()


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_guard_has_what_the_interpreter_needs_to_start_and_no_more(monkeypatch, tmp_path):
    """Some interpreters find their own shared library by LD_LIBRARY_PATH only."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib")
    monkeypatch.setenv("M8D_WEB_TOKEN", "a secret")
    said = tmp_path / "environment"
    monkeypatch.setattr(reaper_client.sys, "executable", program(tmp_path / "python", f"env > {said}"))
    client = ReaperClient(1.0, time.monotonic)
    try:
        assert client._process.wait(30) == 0
    finally:
        client.close()
    lines = said.read_text().splitlines()
    assert "LD_LIBRARY_PATH=/opt/python/lib" in lines
    assert not [line for line in lines if line.startswith("M8D_")]


def test_a_guard_that_ends_at_its_start_is_told_once(monkeypatch, tmp_path):
    now = [0.0]
    with monkeypatch.context() as patched:
        patched.setattr(reaper_client.sys, "executable", program(tmp_path / "python", "exit 127"))
        client = ReaperClient(1.0, lambda: now[0])
        told = []
        for _ in range(5):
            client._process.wait(30)
            now[0] += 1.5
            told.append(client.check())
        client._process.wait(30)
    try:
        assert "exit code 127" in told[0]
        assert told[1:] == [""] * 4
        now[0] += 1.5
        assert client.check() == "", "a good one"
        now[0] += 1.5
        assert client.check() == "", "it has lasted"
        client._process.kill()
        client._process.wait(30)
        assert "exit code -9" in client.check()
        assert client.pid is not None
    finally:
        client.close()


# a launcher that stands still

PATIENCE = 3.0


def decided(reaper, *waits):
    """What the reaper decides after these waits without a sign of life, in seconds each."""
    said = ""
    for seconds in waits:
        reaper.waited(seconds)
        said = said or reaper.judge()
    return said


@pytest.fixture
def watching():
    """A reaper that watches a launcher with one worker, which is this process."""
    reaper = OrphanReaper(0.0, patience=PATIENCE)
    reaper.hear(f"started t1 {os.getpid()} {start_time(os.getpid())} 0\n".encode())
    return reaper


def test_workers_of_a_launcher_that_shows_no_life_are_ended(watching):
    assert decided(watching, *[0.25] * 11) == ""
    assert decided(watching, 0.25) == "ended 0 3.0\n"
    assert decided(watching, 0.25) == "", "it was told already"


def test_each_sign_of_life_counts(watching):
    assert decided(watching, *[0.25] * 11) == ""
    watching.hear(b"alive\n")
    assert decided(watching, *[0.25] * 11) == ""
    watching.hear(b"starting t2\n")  # by another thread than the one that watches the other nodes
    assert decided(watching, 0.25) == "ended 0 3.0\n"


def test_time_in_which_the_reaper_itself_stood_still_does_not_count(watching):
    """A suspended machine stops both: the launcher has time for its sign when it wakes."""
    assert decided(watching, 0.25, 3600.0, 0.25, 0.25) == ""
    watching.hear(b"alive\n")
    assert decided(watching, 3600.0) == ""


def test_a_launcher_without_workers_may_stand_still():
    """It waits for other nodes, or for what --preload imports: minutes."""
    reaper = OrphanReaper(0.0, patience=PATIENCE)
    assert decided(reaper, *[0.25] * 100) == ""
    reaper.hear(f"started t1 {os.getpid()} {start_time(os.getpid())} 0\n".encode())
    assert decided(reaper, *[0.25] * 11) == ""
    reaper.hear(f"gone {os.getpid()}\nstarted t2 {os.getpid()} -1 0\n".encode())
    assert decided(reaper, *[0.25] * 20) == "", "the worker has ended by itself"


def test_the_launcher_of_one_node_may_stand_still():
    reaper = OrphanReaper(0.0)
    assert not reaper.switch.on
    reaper.hear(f"started t1 {os.getpid()} {start_time(os.getpid())} 0\n".encode())
    assert decided(reaper, *[0.5] * 10_000) == ""


def test_a_launcher_may_stand_still_where_the_run_ends_for_all(watching):
    watching.hear(b"free\n")
    assert not watching.switch.on
    assert decided(watching, *[0.25] * 1000) == ""


def test_workers_of_a_lost_seat_are_ended_at_once(watching):
    watching.hear(b"renewed 7\nseatless\n")
    assert watching.judge() == "ended 7 0.0\n"
    watching.hear(b"alive\nrenewed 8\n")
    assert decided(watching, *[0.25] * 11) == ""
    assert decided(watching, 0.25) == "ended 8 3.0\n"


def test_what_could_not_be_started_is_not_ended(monkeypatch):
    reaper = OrphanReaper(0.0, patience=PATIENCE)
    client = ReaperClient(0.0, time.monotonic)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(client, "_say", lambda line: reaper.hear(f"{line}\n".encode()))
            token = client.token()
            assert reaper.starting == {token}
            client.not_started(token)
    finally:
        client.close()
    reaper.hear(b"seatless\n")
    assert reaper.judge() == ""


@pytest.fixture
def sleepers():
    """Returns a function that starts a process which a reaper's client reports."""
    started = []

    def start(client):
        token = client.token()
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        started.append((client, process))
        client.started(token, process.pid, leads=True)
        return process

    yield start
    for client, process in started:
        process.kill()
        process.wait(60)
        client.gone(process.pid)
    for client, _ in started:
        client.close()


def stood(client, process):
    """For how long the launcher had stood still when the process was ended, as the client knows it then."""
    assert process.wait(60) == -signal.SIGKILL
    client.gone(process.pid)
    return client.ended_workers()


def test_the_launcher_knows_that_its_workers_were_ended_before_they_end(sleepers):
    client = ReaperClient(0.0, time.monotonic, patience=0.5)
    assert client.ended_workers() is None
    assert stood(client, sleepers(client)) >= 0.5
    assert client.ended_workers() is None, "it is said once"
    client.alive()
    assert stood(client, sleepers(client)) is None, "it was started before the launcher knew that"
    client.renew()
    assert stood(client, sleepers(client)) >= 0.5


def test_a_lost_seats_workers_are_ended_and_no_later_ones(sleepers):
    client = ReaperClient(0.0, time.monotonic, patience=600.0)
    before = sleepers(client)
    client.seatless()
    client.renew()  # the launcher was about to end them itself
    after = sleepers(client)
    client.seatless()
    assert stood(client, after) == 0.0, "what was said of the first is of no interest any more"
    before.kill()


def test_a_reaper_that_was_started_again_goes_on_as_the_first(sleepers):
    now = [0.0]
    client = ReaperClient(0.0, lambda: now[0], patience=600.0)
    client.renew()
    process = sleepers(client)
    assert client._process is not None
    client._process.kill()
    client._process.wait()
    now[0] = 5.0
    assert client.check()
    client.seatless()
    assert stood(client, process) == 0.0
