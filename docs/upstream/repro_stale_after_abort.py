"""A peer dies. CleanUpOnly aborts the communicator, and the pending work reports success over stale data."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from ranks import Rank, Ranks, attempt, backend_of, judge


def program(me: Rank) -> None:
    """Rank 0 has an operation pending when rank 1 dies, and asks its work afterwards."""
    me.init()
    if me.number == 1:
        me.stay()
    tensor = me.ones()
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    me.tell("ready")
    torch.cuda.synchronize()  # until ncclCommAbort has ended the operation
    until = time.monotonic() + 20
    while (later := attempt(me.sum)).startswith("returned") and time.monotonic() < until:
        time.sleep(0.05)  # until the group itself says that it is broken
    said = {
        "wait()": attempt(work.wait),
        "synchronize()": attempt(work.synchronize),
        "get_future().wait()": attempt(lambda: future.wait()[0].tolist()),  # noqa: PLW0108 -- wait() is what may raise
    }
    me.tell("seen", (said, tensor.tolist(), later))


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    with Ranks(program, 2, backend) as ranks:
        ranks.lose(1, when_ready=(0,))
        said, tensor, later = ranks.hear(0, "seen")
    text = "; ".join(f"{name} {each}" for name, each in said.items())
    shown = any(each.startswith("returned") for each in said.values())
    return shown, f"{text}; the sum of ones over two ranks is {tensor}; the next operation {later}"


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
