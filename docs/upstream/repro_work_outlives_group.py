"""A failed work is kept for longer than its group: whether using it, and letting go of it, touches freed memory."""

from __future__ import annotations

import ctypes
import gc

import torch
import torch.distributed as dist
from ranks import Rank, Ranks, attempt, backend_of, judge

M_PERTURB = -6  # of glibc's mallopt: what is freed is overwritten at once, so that nothing hangs on luck
CRASH = 30.0  # seconds: a lock in freed memory may be waited for


def program(me: Rank) -> None:
    """Rank 0 has an operation pending, aborts, destroys the group, and has the work still."""
    me.init()
    if me.number == 1:
        me.stay()
    ctypes.CDLL(None).mallopt(M_PERTURB, 0xAB)
    work = dist.all_reduce(me.ones(), async_op=True)
    dist.group.WORLD._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 -- all versions have this one
    me.tell("before", attempt(work.wait))
    dist.destroy_process_group()
    gc.collect()
    me.tell("destroyed")
    me.tell("after", attempt(work.wait))
    del work
    me.tell("lives")


def look(backend: str) -> tuple[bool, str]:
    """Return whether the defect shows, and what was seen."""
    with Ranks(program, 2, backend) as ranks:
        before = ranks.hear(0, "before")
        ranks.hear(0, "destroyed")
        doing, seen = "wait()", f"wait() {before}; when the group was destroyed"
        try:
            after = ranks.hear(0, "after", CRASH)
            doing, seen = "the work's destructor", f"{seen} it {after}"
            ranks.hear(0, "lives", CRASH)
        except EOFError:
            return True, f"{seen}; in {doing} the process {ranks.fate_of(0, CRASH)[1]}"
        except TimeoutError:
            return True, f"{seen}; {doing} hangs for {CRASH:g} s"
    shown = _kind(before) != _kind(after)
    return shown, f"{seen}; the process lives when the work is gone"


def _kind(said: str) -> str:
    return said.partition(":")[0]


if __name__ == "__main__":
    backend = backend_of(__doc__)
    judge(lambda: look(backend))
