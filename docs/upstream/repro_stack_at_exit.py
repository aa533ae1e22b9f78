"""The program ends while the watchdog resolves the stack of a failed collective: the process is ended by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import ENVIRONMENT, PATIENCE, backend_of, judge

RECORDED = "2000"
"""TORCH_FR_BUFFER_SIZE: the flight recorder keeps stacks. That is the default from 2.12 at the latest."""


def program(rank: int, port: int, backend: str) -> None:
    """Rank 1 dies. Rank 0 goes on until the watchdog has seen it, and ends as every program does."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE))
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    tensor = torch.ones(2).to("cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)
    until = time.monotonic() + PATIENCE
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)  # the watchdog looks ten times a second
    sys.stdout.write("the program ends\n")


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        **os.environ,
        **ENVIRONMENT,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the process is the program's
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": RECORDED,
        "TORCH_FR_BUFFER_SIZE": RECORDED,
        "REPRO_PORT": str(store.port),
    }
    command = [sys.executable, sys.argv[0], "--backend", backend]
    ranks = [
        subprocess.Popen(command, env={**env, "REPRO_RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        told, _ = ranks[0].communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise TimeoutError("rank 0 did not end") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    code = ranks[0].returncode
    if "the program ends" not in told:
        raise EOFError(f"rank 0 did not come to its end: {code}")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return code < 0, f"a program that came to its end {how}"


if __name__ == "__main__":
    backend = backend_of(__doc__)
    if "REPRO_RANK" in os.environ:
        program(int(os.environ["REPRO_RANK"]), int(os.environ["REPRO_PORT"]), backend)
    else:
        judge(lambda: look(backend))
