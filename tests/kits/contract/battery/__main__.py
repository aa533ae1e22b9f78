"""Runs every feature in two worlds of one process at once; started once per rank by test_torch_features.py.

    python -m kits.contract.battery MODE RANK PORT OUT

| mode | |
|---|---|
| stock | plain torch, nothing of multiworld imported: what this torch can do on gloo and CPU at all |
| interleaved | two worlds; at each step of a feature the other world goes on |
| beside | the same with torch's own default group as a third |
| threads | two worlds, a thread each |
| tasks | two worlds, an asyncio task each |

A line of JSON per feature goes to OUT at once: ``{"feature": ..., "ok": ..., "detail": ...}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kits.contract.battery import features_parallel  # noqa: F401  (it is the result)
from kits.contract.battery.features_ops import FEATURES

TIMEOUT = dt.timedelta(seconds=25)
Feature = Callable[[int], Iterator[None]]
Place = tuple[Any, int]  # where a feature runs (a context manager, entered for each step), and its seed


def in_turns(function: Feature, places: list[Place]) -> None:
    running: list[tuple[Any, Iterator[None]]] = []
    for world, seed in places:
        with world:
            running.append((world, function(seed)))
    while running:
        for world, steps in list(running):
            with world:
                try:
                    next(steps)
                except StopIteration:
                    running.remove((world, steps))


def in_threads(function: Feature, places: list[Place]) -> None:
    errors: list[BaseException] = []

    def run(world: Any, seed: int) -> None:
        try:
            with world:
                for _ in function(seed):
                    pass
        except BaseException as error:  # noqa: BLE001  (it is the result)
            errors.append(error)

    threads = [threading.Thread(target=run, args=place, daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        if thread.is_alive():
            raise TimeoutError("a thread of the feature hangs")
    if errors:
        raise errors[0]


def in_tasks(function: Feature, places: list[Place]) -> None:
    async def run(world: Any, seed: int) -> None:
        with world:
            for _ in function(seed):
                # The other task goes on inside this block: the world must come back with this one.
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(*(run(*place) for place in places))

    asyncio.run(both())


class Runner:
    """One mode's places, opened again under the next generation after a failure."""

    def __init__(self, mode: str, rank: int, port: int, store: Any) -> None:
        self.mode, self.rank, self.port, self.store = mode, rank, port, store
        self.generation = 0
        self.worlds: list[Any] = []

    def open(self) -> list[Place]:
        if not self.worlds:
            self.generation += 1
            own = self.mode in {"stock", "beside"}
            if own and not dist.is_initialized():
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"own{self.generation}", self.store),
                    rank=self.rank,
                    world_size=2,
                    timeout=TIMEOUT,
                )
            if self.mode != "stock":
                from kits.contract.battery.worlds import open_worlds

                self.worlds = open_worlds(
                    ["a", "b"],
                    rank=self.rank,
                    size=2,
                    store=f"tcp://127.0.0.1:{self.port}",
                    generation=self.generation,
                )
        own_place = [contextlib.nullcontext()] if self.mode in {"stock", "beside"} else []
        return [(place, seed) for seed, place in enumerate([*self.worlds, *own_place], start=1)]

    def reopen(self) -> None:
        for world in self.worlds:
            world.close()
        self.worlds = []
        if dist.is_initialized():
            dist.destroy_process_group()

    def together(self, key: str, ok: bool) -> bool:
        """Agree with the other rank on whether both are well."""
        self.store.set(f"{key}/{self.rank}", "1" if ok else "0")
        return ok & (self.store.get(f"{key}/{1 - self.rank}") == b"1")


def main(mode: str, rank: int, port: int, out: Path) -> None:
    # Warnings of torch about itself are not what is tested here.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=False, timeout=dt.timedelta(seconds=90))
    runner = Runner(mode, rank, port, store)
    how = {"threads": in_threads, "tasks": in_tasks}.get(mode, in_turns)
    with out.open("w", encoding="utf-8") as report:
        for name, function in FEATURES.items():
            detail = ""
            try:
                how(function, runner.open())
            except Exception:  # noqa: BLE001  (it is the result)
                detail = traceback.format_exc()
            well = runner.together(f"feature/{name}", not detail)
            if not well:
                runner.reopen()
            report.write(json.dumps({"feature": name, "ok": not detail, "detail": detail}) + "\n")
            report.flush()
        runner.reopen()
        runner.together("end", ok=True)
        report.write(json.dumps({"feature": "", "ok": True, "detail": ""}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
