"""The processes of the example, started in milliseconds, and killed."""

from __future__ import annotations

import _ctrl_c

import itertools
import multiprocessing
import signal
import time
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch.distributed as dist

from cartpole.engine import CREATION, TRANSFER, engine

__all__ = ["CONTEXT", "ENGINES", "LOADED", "PATIENCE", "PLAYING", "Fleet"]

ENGINES = 4
PLAYING = "while it plays"
PATIENCE = 120.0
"""Seconds to start, or to end."""

# Starts a process in milliseconds: this is loaded once, in the server that they are forked from.
LOADED = [
    "torch",
    "gymnasium",
    "numpy",
    "multiworld.weights",
    "multiworld._join.steps",
    "multiworld._generation.generation",
]
CONTEXT: Any = multiprocessing.get_context("forkserver")


class Fleet:
    """The trainer and the engines; `kills` has when engines were killed (time.monotonic), by the moment of their lives."""

    def __init__(self) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = f"tcp://127.0.0.1:{self.server.port}"
        self.running: dict[int | str, Any] = {}
        self.seats = itertools.cycle(range(ENGINES))
        self.moments = itertools.cycle(("", CREATION, TRANSFER))
        self.kills: dict[str, list[float]] = {PLAYING: [], CREATION: [], TRANSFER: []}

    def start(self, name: int | str, target: Any, *arguments: object) -> None:
        """Start a process."""
        if not self.running:  # the server loads torch first: Ctrl-C is not kept back meanwhile
            nothing = CONTEXT.Process(target=int)
            nothing.start()
            nothing.join()
        with _ctrl_c.kept_back():
            self.running[name] = CONTEXT.Process(target=target, args=arguments, daemon=True)
            self.running[name].start()

    def start_engine(self, seat: int, moment: str = "") -> None:
        """Start an engine that dies at a moment, if one is given."""
        self.start(seat, engine, self.store, seat, moment)
        if moment:
            self.running[seat].join(PATIENCE)
            if self.running[seat].exitcode != -signal.SIGKILL:
                raise SystemExit(f"engine {seat} was to die {moment}, and did not")
            self.kills[moment].append(time.monotonic())
            self.start_engine(seat)

    def kill(self, seat: int) -> None:
        """Kill an engine that plays."""
        self.running[seat].kill()
        self.running[seat].join()
        self.kills[PLAYING].append(time.monotonic())

    def killed(self) -> int:
        """How many engines were killed."""
        return sum(map(len, self.kills.values()))

    def __enter__(self) -> Fleet:
        resource_tracker.ensure_running()  # its start, which the server's would begin with, lets signals through again
        with _ctrl_c.kept_back():
            forkserver.ensure_running()
        _ctrl_c.raises()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        with _ctrl_c.kept_back():
            for process in self.running.values():
                process.kill()
            for process in self.running.values():
                process.join()
        _ctrl_c.ends_at_once()
        return kind is KeyboardInterrupt
