"""A socket pair between two ranks, and processes of MPI that do not start."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from benchmarks.limits import mpi  # noqa: E402  (torch may be missing)
from benchmarks.limits.mpi import MpiError, MpiRanks  # noqa: E402
from benchmarks.operations.floor import Floor  # noqa: E402


@pytest.fixture
def ends():
    name = f"m8d-test-floor-{os.getpid()}"
    both = [Floor(rank, name) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(each.connect) for each in both]:
            done.result(30)
        yield both, pool
    for each in both:
        each.close()


@pytest.mark.parametrize("count", [1, 1 << 20])
def test_tensors_go_to_and_fro(ends, count):
    (first, second), pool = ends
    sent, received = torch.arange(float(count)) + 1, torch.zeros(count)
    for one, other in ((first, second), (second, first)):
        received.fill_(0)
        sending = pool.submit(one.send, sent, 1)
        other.recv(received, 0)
        sending.result(30)
        assert torch.equal(sent, received)


def test_an_end_in_the_middle_is_an_error(ends):
    (first, second), _ = ends
    first.send(torch.zeros(3), 1)
    first.close()
    with pytest.raises(EOFError, match="12 of 16"):
        second.recv(torch.zeros(4), 0)


def program(folder, text):
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_mpirun_that_fails_is_noticed_at_once(tmp_path, monkeypatch):
    program(tmp_path, "echo there are not enough slots; exit 3")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    began = time.monotonic()
    with pytest.raises(MpiError, match=r"(?s)status 3.*not enough slots"), MpiRanks(2):
        pass
    assert time.monotonic() - began < 30


def test_processes_that_do_not_come_are_ended(tmp_path, monkeypatch):
    program(tmp_path, '[ "$1" = --version ] || exec sleep 600')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(mpi, "START_SECONDS", 0.3)
    monkeypatch.setattr(mpi, "END_SECONDS", 0.2)
    with pytest.raises(MpiError, match="did not start"), MpiRanks(2):
        pass
