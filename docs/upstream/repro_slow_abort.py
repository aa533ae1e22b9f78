"""A slow ncclCommAbort counts as a stuck watchdog: the heartbeat monitor ends the process under CleanUpOnly."""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from ranks import Rank, Ranks, backend_of, judge, with_faults

ALIVE = 30.0
"""Seconds after which a process that is still there is left alone: the monitor's time is two."""


def program(me: Rank) -> None:
    """Rank 0 has an operation pending when rank 1 dies, and its abort takes long."""
    me.init()
    if me.number == 1:
        me.stay()
    os.environ["FAULT_ABORT_MS"] = "60000"
    dist.all_reduce(me.ones(), async_op=True)
    me.tell("ready")
    time.sleep(3600)


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    env = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2"}
    with Ranks(program, 2, backend, env) as ranks:
        ranks.lose(1, when_ready=(0,))
        ended, how = ranks.fate_of(0, ALIVE)
    return ended, f"the process {how}"


if __name__ == "__main__":
    backend = backend_of(__doc__)
    with_faults()
    judge(lambda: look(backend))
