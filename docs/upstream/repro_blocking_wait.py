"""A peer dies, NCCL says so, but a caller in a blocking wait() waits for the operation's timeout."""

from __future__ import annotations

import time

import torch.distributed as dist
from ranks import Rank, Ranks, attempt, backend_of, judge

TIMEOUT = 8.0


def program(me: Rank) -> None:
    """Rank 0 is in a blocking wait() when rank 1 dies."""
    me.init(seconds=TIMEOUT)
    if me.number == 1:
        me.stay()
    work = dist.all_reduce(me.ones(), async_op=True)
    me.tell("ready")
    began = time.monotonic()
    said = attempt(work.wait)
    me.tell("seen", (time.monotonic() - began, said))


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    with Ranks(program, 2, backend, {"TORCH_NCCL_BLOCKING_WAIT": "1"}) as ranks:
        ranks.lose(1, when_ready=(0,))
        seconds, said = ranks.hear(0, "seen")
    text = f"wait() {said}, after {seconds:.1f} s; the operation's timeout is {TIMEOUT:g} s"
    return seconds > TIMEOUT - 1, text


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
