"""The watchdog waits for the flight recorder's dump before it aborts: nobody is let go meanwhile."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from ranks import Rank, Ranks, backend_of, judge

DUMP = 2.5
"""TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, in seconds. The default is 15."""


def program(me: Rank) -> None:
    """Rank 0 has an operation pending when rank 1 dies."""
    me.init()
    if me.number == 1:
        me.stay()
    dist.all_reduce(me.ones(), async_op=True)
    me.tell("ready")
    torch.cuda.synchronize()
    me.tell("let go")


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    env = {
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(round(DUMP * 1000)),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_COORD_CHECK_MILSEC": "30000",  # whoever dumps comes late
    }
    with Ranks(program, 2, backend, env) as ranks:
        ranks.lose(1, when_ready=(0,))
        began = time.monotonic()
        ranks.hear(0, "let go")
        seconds = time.monotonic() - began
    text = f"the caller was let go {seconds:.1f} s after the peer's death; the time for a dump is {DUMP:g} s"
    return seconds > 1.5 * DUMP, text


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
