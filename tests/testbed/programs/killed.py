"""A rank that waits for one that is killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from bed.rank import Rank

_LONG = 600.0
_LOOKS = 5


def waits(me: Rank) -> None:
    """Rank 0 waits for rank 1; rank 1 is there, and is killed."""
    me.init(me.config.get("backend", "nccl"), timeout=_LONG)
    tensor = torch.ones(4).to(me.device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if me.rank == 1:
        if me.config["op"] == "recv":
            dist.send(tensor, 0)
            torch.cuda.synchronize()
        me.event("pending")
        time.sleep(_LONG)
    if me.config["op"] == "recv":
        dist.recv(tensor, 1)  # the pair has its communicator before the one that counts
        torch.cuda.synchronize()
    work = dist.irecv(tensor, 1) if me.config["op"] == "recv" else dist.all_reduce(tensor, async_op=True)
    inside = threading.Event()

    def wait() -> None:
        def both() -> None:
            inside.set()
            work.wait()
            torch.cuda.current_stream().synchronize()

        me.attempt("waited", both)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    inside.wait(_LONG)
    _until_asleep(waiting)
    me.event("pending")
    me.hear("killed", timeout=_LONG)
    waiting.join(me.config["seconds"])
    if waiting.is_alive():
        me.event("gave up")


def _until_asleep(thread: threading.Thread) -> None:
    """Wait until a thread sleeps in the kernel whenever one looks: then it is inside the call that does not return.

    What a caller is told who comes only after the abort is another matter.
    """
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    seen, deadline = 0, time.monotonic() + _LONG
    while seen < _LOOKS and time.monotonic() < deadline:
        seen = seen + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.005)
