"""The worker of `benchmarks.starts`: joins the world of all workers, and says when that works.

It sends JSON to the datagram socket of M8D_BENCH_SOCKET: "loaded" when torch is imported, "joined" with its
CPU seconds, "whole" after an operation of each generation. Rank 0 then waits in a receive for a breakage, the
others for a datagram that ends the run.
"""

from __future__ import annotations

import json
import os
import socket
import time

import torch

import multiworld as mw


def main() -> None:
    """Join, and be there until the world is closed."""
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.connect(os.environ["M8D_BENCH_SOCKET"])

    def tell(name: str) -> None:
        line = {"name": name, "rank": int(os.environ["RANK"]), "pid": os.getpid()}
        line |= {"at": time.monotonic(), "cpu": time.process_time()}
        told.send(json.dumps(line).encode())

    tell("loaded")
    (world,) = mw.join_all().values()
    tell("joined")
    value = torch.ones(1)
    while True:
        try:
            world.all_reduce(value)
            tell("whole")
            world.recv(value, (world.rank + 1) % world.world_size)  # until one of them is killed
        except mw.BrokenWorldException:  # noqa: PERF203  (once in a generation)
            world.wait_active(timeout=120)


if __name__ == "__main__":
    main()
