"""What the guard of a launcher's workers makes of what it hears."""

from __future__ import annotations

import os
from pathlib import Path

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
