"""The smallest programs: for the tests of the launcher itself. They need no NCCL."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bed.rank import Rank

_LONG = 600.0  # seconds; longer than any test waits


def sums(me: Rank) -> None:
    """An all_reduce over the configured backend."""
    import torch
    import torch.distributed as dist

    me.init(me.config.get("backend", "gloo"))
    tensor = torch.tensor([float(me.rank + 1)]).to(me.device)
    dist.all_reduce(tensor)
    me.event("sum", value=tensor)
    dist.destroy_process_group()


def talks(me: Rank) -> None:
    """Say back what is heard."""
    while True:
        heard = me.hear("say", timeout=_LONG)
        if heard.get("end"):
            return
        me.event("said", **heard)


def waits(me: Rank) -> None:
    """Be there."""
    me.event("ready", threads=threading.active_count())
    me.hear("go", timeout=_LONG)
    me.event("gone")


def ends(me: Rank) -> None:
    """End as the configuration says."""
    how = me.config["how"]
    print(f"rank {me.rank} ends: {how}")  # noqa: T201
    print("on stderr too", file=sys.stderr)  # noqa: T201
    if how == "raise":
        raise RuntimeError("as asked")
    if how == "abort":
        os.abort()
    if how == "exit":
        sys.exit(me.config["code"])
    if how == "hard":
        os._exit(me.config["code"])


def shows(me: Rank) -> None:
    """Tell the environment and what can be seen of the process."""
    names = me.config["names"]
    me.event("seen", env={name: os.environ.get(name) for name in names}, pid=os.getpid(), parent=os.getppid())


def prints(me: Rank) -> None:
    """Write the configured text, as the double would."""
    sys.stderr.write(me.config["text"])


def sleeps(me: Rank) -> None:
    """Hang without a word."""
    time.sleep(_LONG)


def stores(me: Rank) -> None:
    """Tell the ports of the store servers."""
    me.event("stores", ports=me.store_ports)
    me.hear("go", timeout=_LONG)


def controls(me: Rank) -> None:
    """Set a knob, in a fault, and look."""
    before = me.bed.get("ABORT_RESULT")
    with me.bed.abort_fails(4):
        inside = me.bed.get("ABORT_RESULT")
    me.event("controls", before=before, inside=inside, after=me.bed.get("ABORT_RESULT"), stubs=me.bed.stubs())
