"""While ncclCommAbort hangs, whoever asks the group or its works is blocked too."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ranks import Rank, Ranks, aborts_begun, attempt, backend_of, judge, with_faults

if TYPE_CHECKING:
    from collections.abc import Callable

HANGS = 10.0


def program(me: Rank) -> None:
    """Rank 0 has an operation pending when rank 1 dies, and its abort hangs."""
    me.init()
    if me.number == 1:
        me.stay()
    os.environ["FAULT_ABORT_MS"] = str(round(HANGS * 1000))
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        work = dist.all_reduce(me.ones(), async_op=True)
    me.tell("ready")
    until = time.monotonic() + 30
    while not aborts_begun() and time.monotonic() < until:
        time.sleep(0.05)
    took: dict[str, tuple[float, str]] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        said = attempt(call)
        took[name] = (time.monotonic() - began, said)

    timed("is_completed()", work.is_completed)
    with torch.cuda.stream(aside):
        timed("the next operation", lambda: dist.all_reduce(me.ones(), async_op=True) and None)
    me.tell("seen", took)


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    with Ranks(program, 2, backend) as ranks:
        ranks.lose(1, when_ready=(0,))
        took = ranks.hear(0, "seen")
    text = "; ".join(f"{name} {said} after {seconds:.1f} s" for name, (seconds, said) in took.items())
    blocked = any(seconds > HANGS / 3 for seconds, _ in took.values())
    return blocked, f"while ncclCommAbort hangs for {HANGS:g} s: {text}"


if __name__ == "__main__":
    backend = backend_of(__doc__)
    with_faults()
    judge(lambda: look(backend))
