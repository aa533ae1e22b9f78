"""A batch_isend_irecv of one group fails; after it another group's all_reduce returns its own input."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from ranks import Rank, Ranks, attempt, backend_of, judge


def program(me: Rank) -> None:
    """Both ranks call batch_isend_irecv with a type that NCCL does not have, then use another group."""
    me.init()
    healthy = dist.new_group([0, 1])
    me.sum(healthy)
    peer = 1 - me.number
    wrong = torch.zeros(2, dtype=torch.int16).to("cuda")  # a type that NCCL does not have
    batch = [dist.P2POp(dist.isend, me.ones(), peer), dist.P2POp(dist.irecv, wrong, peer)]
    failed = attempt(lambda: dist.batch_isend_irecv(batch))
    tensor = me.ones()

    def after() -> float:
        work = healthy.allreduce([tensor])
        until = time.monotonic() + 5
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        return tensor.cpu()[0].item()

    me.tell("seen", (failed, attempt(after)))


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    with Ranks(program, 2, backend) as ranks:
        failed, after = ranks.hear(0, "seen")
    text = f"batch_isend_irecv {failed}; then the other group's all_reduce of ones over two ranks {after}"
    return failed.startswith("raised") and after != "returned 2.0", text


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
