"""Worlds on NCCL whose store's process is stopped."""

from __future__ import annotations

import datetime as dt
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from programs.worldkit import broken, full, joined, until

if TYPE_CHECKING:
    from bed.rank import Rank

ASKED = 3.0  # seconds; torch's heartbeat monitor asks the store each second


def serves(me: Rank) -> None:
    """A store's process, and no member of any world."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, dt.timedelta(seconds=30), wait_for_workers=False)
    me.event("store", port=store.port)
    me.hear("end", timeout=600)


class Ticks:
    """A thread that needs the GIL all the time; `longest` is the longest time in seconds it did not have it."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self.longest = max(self.longest, now - last)
            last = now

    def end(self) -> float:
        self._over.set()
        self._thread.join()
        return self.longest


def closes(me: Rank) -> None:
    """Members close their world while its store stands still: in good order, or after one of them was killed."""
    me.store_ports[:] = [me.config["port"]]
    world = joined(me)
    world.all_reduce(full(1, me.device))
    me.event("ready")
    me.hear("go", timeout=600)
    ticks = Ticks()
    time.sleep(ASKED)
    if me.config["killed"]:
        with broken(me, "broken"):
            world.all_reduce(full(1, me.device))
    began = time.monotonic()
    free = world.close()
    seconds = time.monotonic() - began
    gone = until(lambda: me.bed is None or me.bed.count("comms") == 0, 60)
    me.event("closed", free=free, seconds=seconds, gone=gone, late=time.monotonic() - began, gap=ticks.end())
