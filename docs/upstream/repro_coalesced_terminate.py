"""A call inside allreduce_coalesced fails: std::terminate instead of an exception."""

from __future__ import annotations

import os

import torch.distributed as dist
from ranks import Rank, Ranks, attempt, backend_of, judge, with_faults


def program(me: Rank) -> None:
    """NCCL refuses a call inside the operation."""
    me.init()
    tensors = [me.ones(), me.ones()]
    os.environ["FAULT_ALL_REDUCE"] = "1"
    me.tell("seen", attempt(lambda: dist.group.WORLD.allreduce_coalesced(tensors)))


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    with Ranks(program, 2, backend) as ranks:
        try:
            return False, f"allreduce_coalesced {ranks.hear(0, 'seen')}"
        except EOFError:
            ended, how = ranks.fate_of(0, 10)
            return ended, f"the process, in allreduce_coalesced, {how}"


if __name__ == "__main__":
    backend = backend_of(__doc__)
    with_faults()
    judge(lambda: look(backend))
