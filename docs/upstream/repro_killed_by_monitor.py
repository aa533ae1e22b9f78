"""A peer dies and the clean-up succeeds; then the heartbeat monitor ends the process all the same."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from ranks import Rank, Ranks, backend_of, judge

MONITOR = 10
"""Seconds of the monitor: the clean-up must be over before."""
ALIVE = 30.0
"""Seconds after which a process that is still there is left alone."""


def program(me: Rank) -> None:
    """Rank 0 has an operation pending when rank 1 dies, and goes on when the abort is over."""
    me.init()
    if me.number == 1:
        me.stay()
    dist.all_reduce(me.ones(), async_op=True)
    me.tell("ready")
    torch.cuda.synchronize()
    me.tell("goes on")
    time.sleep(3600)


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    env = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(MONITOR), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    with Ranks(program, 2, backend, env) as ranks:
        ranks.lose(1, when_ready=(0,))
        ranks.hear(0, "goes on")
        ended, how = ranks.fate_of(0, ALIVE)
    return ended, f"the communicator was aborted and the caller went on; then the process {how}"


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
