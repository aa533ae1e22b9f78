"""A peer dies. What type has the exception of the broken group's next operation?"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from ranks import Rank, Ranks, attempt, backend_of, judge


def program(me: Rank) -> None:
    """Rank 0 has an operation pending when rank 1 dies, and uses the group again."""
    me.init()
    if me.number == 1:
        me.stay()
    dist.all_reduce(me.ones(), async_op=True)
    me.tell("ready")
    torch.cuda.synchronize()  # until ncclCommAbort has ended the operation
    until = time.monotonic() + 20
    while (later := attempt(me.sum)).startswith("returned") and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)  # whoever met the abort itself may have been told of it in another way
    me.tell("seen", (later, attempt(me.sum)))


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    with Ranks(program, 2, backend) as ranks:
        ranks.lose(1, when_ready=(0,))
        first, second = ranks.hear(0, "seen")
    sound = all(each.startswith("raised DistBackendError") for each in (first, second))
    return not sound, f"the next operations: {first}; {second}"


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
