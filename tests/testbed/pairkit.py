"""What the tests of the patches share: how ranks are started and broken, and what is asked of them."""

from __future__ import annotations

import time

import pytest

# Seconds within which a caller is let go; a tenth of one in truth. What would hold it up lasts longer by far.
PROMPT = 20.0
FOR_EVER = 600.0  # seconds that a hang lasts unless its knob is changed
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    # Before the watchdog does anything about an error it resolves the stack that the flight recorder has: 2.4 s of
    # processor time, which a busy machine makes longer than the heartbeats of these tests.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}
DUMPING = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
LEGACY = "ProcessGroupNCCL"


@pytest.fixture(name="run")
def running(launch, build, tmp_path):
    """Start a program of ``programs/patches.py``, or MODULE:PROGRAM, with the older class, whatever its name is, under CleanUpOnly."""
    backend = next((name for name, kind in build.backends.items() if kind == LEGACY), None)
    if backend is None:
        pytest.skip(f"{build.name} has no {LEGACY}")
    quiet = {**QUIET, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "dump")}

    def start(program, size=2, *, env=None, timeout=120, **config):
        config = {"backend": backend, **config}
        program = program if ":" in program else f"patches:{program}"
        return launch(program, size, config=config, env={**quiet, **(env or {})}, timeout=timeout)

    return start


def lose(ranks, survivors=(0,), victim=1):
    """Kill the victim when the survivors are ready; return when."""
    ranks.wait("victim", ranks=[victim])
    ranks.wait("ready", ranks=survivors)
    return ranks.kill(victim)


def names_remote_error(text):
    return "ncclRemoteError" in text


def until_logged(ranks, rank, text, seconds=30.0):
    """Wait until a rank has logged something; AssertionError where it ends before, or takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        ended = None if rank in ranks.alive() else ranks.exits[rank]
        logged = ranks.stderr(rank)
        if text in logged:
            return
        assert ended is None, f"{ended} before it had logged {text!r}: {logged[-4000:]}"
        assert time.monotonic() < deadline, f"no {text!r} after {seconds} s: {logged[-4000:]}"
        time.sleep(0.05)


def still(ranks, rank, seconds):
    """A rank must go on living for so long; the official build would not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert rank in ranks.alive(), ranks.exits[rank]
        time.sleep(0.1)
