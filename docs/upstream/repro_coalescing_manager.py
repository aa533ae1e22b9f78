"""A batch_isend_irecv fails; after it the group's all_reduce does nothing, and says nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import Rank, Ranks, attempt, backend_of, judge


def program(me: Rank) -> None:
    """Both ranks call batch_isend_irecv with a tensor that no backend of the group is for."""
    me.init()
    peer = 1 - me.number
    wrong = torch.zeros(2)  # on the CPU: no NCCL group is for that
    batch = [dist.P2POp(dist.isend, me.ones(), peer), dist.P2POp(dist.irecv, wrong, peer)]
    failed = attempt(lambda: dist.batch_isend_irecv(batch))
    me.tell("seen", (failed, attempt(me.sum)))


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    with Ranks(program, 2, backend) as ranks:
        failed, after = ranks.hear(0, "seen")
    text = f"batch_isend_irecv {failed}; then all_reduce of ones over two ranks {after}"
    return failed.startswith("raised") and after == "returned 1.0", text


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
