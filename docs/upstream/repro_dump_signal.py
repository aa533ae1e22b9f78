"""Two jobs share a store server, each behind a prefix of its own. One breaks, and the other one's processes die."""

from __future__ import annotations

import time

import torch.distributed as dist
from ranks import Rank, Ranks, backend_of, judge

HEARTBEAT = 5
"""Seconds of the monitor: a watchdog that is silent for longer sends no signal."""
ALIVE = 30.0
"""Seconds after which a process that is still there is left alone: the monitor ends it after one heartbeat."""


def program(me: Rank) -> None:
    """Ranks 0 and 1 are one job, 2 and 3 another one; rank 1 dies."""
    first = me.number < 2
    me.init((0, 1) if first else (2, 3), prefix="first" if first else "second")
    if me.number == 1:
        me.stay()
    if me.number == 0:
        dist.all_reduce(me.ones(), async_op=True)
    me.tell("ready")
    time.sleep(3600)


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    env = {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_COORD_CHECK_MILSEC": "200",
    }
    with Ranks(program, 4, backend, env) as ranks:
        ranks.lose(1, when_ready=(0, 2, 3))
        ended, how = ranks.fate_of(2, ALIVE)
    return ended, f"a process of the job that did not break {how}"


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
