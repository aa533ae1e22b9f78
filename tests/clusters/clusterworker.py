"""A worker of a run on a cluster: `clusterworker.py FOLDER` sums in all its worlds until FOLDER/go is there.

What it meets it tells: lines of JSON in FOLDER/told, where `told` reads them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

WORLDS = """
[roles]
hub = 1
worker = {workers}

[worlds."w{{i}}"]
for = "worker"
members = ["hub:0", "worker:{{i}}"]
timeout = 90
hang_timeout = 5
"""
"""A hub shares a world with each worker."""


def told(folder, name, **match):
    """What workers told by a name, with these values."""
    path = Path(folder) / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [
        each for each in found
        if each["name"] == name and all(each.get(key) == value for key, value in match.items())
    ]  # fmt: skip


class Worker:
    def __init__(self, folder):
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.run = os.environ["TORCHELASTIC_RUN_ID"]

    def tell(self, name, **data):
        line = {
            "name": name, "rank": self.rank, "pid": os.getpid(), "host": socket.gethostname(), "run": self.run,
            "at": time.monotonic(), **data,
        }  # fmt: skip
        with (self.folder / "told").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def work(self, world):
        """Sum until all are to end; go on with the next generation when the world breaks."""
        import torch

        import multiworld as mw

        generation = 0
        while True:
            try:
                t = torch.tensor([1.0, float((self.folder / "go").exists())])
                world.all_reduce(t)
                assert t[0].item() == world.world_size
                if world.generation != generation:
                    generation = world.generation
                    reads = sorted(world._gen.lane.endpoint._reading._readers)  # whose memory it may
                    self.tell("active", world=world.name, generation=generation, reads=reads)
                if t[1].item():
                    return
                time.sleep(0.02)
            except mw.BrokenWorldException as broken:  # noqa: PERF203  (the loop is about it)
                self.tell("broke", world=world.name, cause=broken.cause, generation=broken.generation)
                if (self.folder / "go").exists():  # the other one saw it first
                    return
                world.wait_active(150)

    def main(self):
        import multiworld as mw

        self.tell("born", cpus=len(os.sched_getaffinity(0)))
        worlds = mw.join_all(timeout=150)
        threads = [threading.Thread(target=self.work, args=(world,)) for world in worlds.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.tell("end")


if __name__ == "__main__":
    if "--deaf" in sys.argv:  # it does not end by SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Worker(Path(sys.argv[1])).main()
