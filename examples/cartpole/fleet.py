"""The processes of the example, started in milliseconds, and killed."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from typing import Any

import torch.distributed as dist

from cartpole.engine import CREATION, TRANSFER, engine

__all__ = ["CONTEXT", "ENGINES", "LOADED", "PATIENCE", "Fleet"]

ENGINES = 4
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
    """The trainer and the engines; `kills` counts those that were killed, by the moment."""

    def __init__(self) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = f"tcp://127.0.0.1:{self.server.port}"
        self.running: dict[int | str, Any] = {}
        self.seats = itertools.cycle(range(ENGINES))
        self.moments = itertools.cycle(("", CREATION, TRANSFER))
        self.kills = {"while it plays": 0, CREATION: 0, TRANSFER: 0}

    def start(self, name: int | str, target: Any, *arguments: object) -> None:
        """Start a process."""
        self.running[name] = CONTEXT.Process(target=target, args=arguments, daemon=True)
        self.running[name].start()

    def start_engine(self, seat: int, moment: str = "") -> None:
        """Start an engine that dies at a moment, if one is given."""
        self.start(seat, engine, self.store, seat, moment)
        if moment:
            self.running[seat].join(PATIENCE)
            if self.running[seat].exitcode != -signal.SIGKILL:
                raise SystemExit(f"engine {seat} was to die {moment}, and did not")
            self.kills[moment] += 1
            self.start_engine(seat)

    def kill(self, seat: int) -> None:
        """Kill an engine that plays."""
        self.running[seat].kill()
        self.running[seat].join()
        self.kills["while it plays"] += 1

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for process in self.running.values():
            process.kill()
            process.join()
        return kind is KeyboardInterrupt
