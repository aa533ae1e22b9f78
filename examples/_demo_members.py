"""The processes of the demo: a hub that exchanges messages in every world, and one worker for each world.

The hub tells what happens as lines of JSON on its standard output, and ends when its standard input does.
Times are CLOCK_MONOTONIC, which all processes of a host share. The worlds' hang_timeout is in M8D_HANG_TIMEOUT.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import multiworld as mw
from _common import leave

TELL_EVERY = 0.25
"""Seconds between two reports of what went through."""


def tell(event: str, **data: Any) -> None:
    """Tell the demo what happened; one write, so that threads do not mix their lines."""
    line = json.dumps({"event": event, "now": time.monotonic(), **data}) + "\n"
    with contextlib.suppress(
        BrokenPipeError
    ):  # the demo was killed; so standard input ends, and this process too
        os.write(sys.stdout.fileno(), line.encode())


class Line(threading.Thread):
    """One world of the hub: sends numbers and expects them back, and joins again when the world broke."""

    def __init__(self, name: str, store: str) -> None:
        super().__init__(name=name, daemon=True)
        self.store = store
        self.over = False
        self.messages = 0
        self.wrong = 0
        self.slowest = 0.0

    def run(self) -> None:
        """Run until told that it is over."""
        while not self.over:
            try:
                world = mw.join(self.name, 0, 2, store=self.store, timeout=60)
            except mw.JoinError as error:
                tell("refused", world=self.name, text=f"{type(error).__name__}: {error}")
                time.sleep(0.1)
                continue
            tell("active", world=self.name, generation=world.generation)
            try:
                self._exchange(world)
            except mw.BrokenWorldException as error:
                tell("broken", world=self.name, cause=error.cause, ranks=error.ranks, text=error.detail)

    def _exchange(self, world: mw.World) -> None:
        sent, back = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        while not self.over:
            sent += 1
            began = time.monotonic()
            world.send(sent, 1)
            world.recv(back, 1)
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.wrong += bool(sent != back)
            self.messages += 1
            time.sleep(0.002)  # enough to see; two cores are to be left for what else runs here
        world.send(torch.zeros(1, dtype=torch.int64), 1)
        leave(world)


def hub(worlds: list[str]) -> int:
    """Serve the store on a port that is free, and exchange messages until standard input ends."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tell("port", port=server.port)
    lines = [Line(name, f"tcp://127.0.0.1:{server.port}") for name in worlds]
    for line in lines:
        line.start()
    while not select.select([sys.stdin], [], [], TELL_EVERY)[0]:
        tell("rates", messages={line.name: line.messages for line in lines},
             slowest={line.name: 1000 * line.slowest for line in lines})  # fmt: skip
        for line in lines:
            line.slowest = 0.0
    for line in lines:
        line.over = True
    deadline = time.monotonic() + 30
    for line in lines:
        line.join(max(0.0, deadline - time.monotonic()))
    tell(
        "end", wrong=sum(line.wrong for line in lines), late=[line.name for line in lines if line.is_alive()]
    )
    return 0


def worker(name: str, port: int) -> int:
    """Send every number back, until 0 comes. When the world breaks, join it again: that ends if the hub is gone."""
    torch.set_num_threads(1)
    number = torch.zeros(1, dtype=torch.int64)
    while True:
        try:
            world = mw.join(name, 1, 2, store=f"tcp://127.0.0.1:{port}", timeout=20)
            while world.recv(number, 0) == 0 and number.item():
                world.send(number, 0)
        except mw.BrokenWorldException:
            continue
        except mw.JoinError:
            return 1
        leave(world)
        return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(hub(sys.argv[1:]))
