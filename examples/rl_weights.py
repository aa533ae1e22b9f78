"""Reinforcement learning whose engines are killed: CartPole, one trainer, four rollout engines.

The trainer publishes its policy after each step (`multiworld.weights`); each engine plays with the newest version
it was told, whole, and sends what happened in a world of its own. First nothing happens for some seconds. Then an
engine is killed with SIGKILL every `--kill-every` seconds and started again; of the new ones some die in group
creation, and some in the middle of a transfer of weights. At the end it says what the trainer noticed of that.

    python examples/rl_weights.py                      20 s undisturbed, 20 s with kills
    python examples/rl_weights.py --seconds 120        of both parts
    python examples/rl_weights.py --plain              the same on plain torch.distributed, until the first kill

It needs gymnasium: pip install gymnasium
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from cartpole import plain
from cartpole.engine import CREATION, TRANSFER, engine
from cartpole.trainer import trainer

ENGINES = 4
PATIENCE = 120.0
PLAIN_TIMEOUT = 20.0
"""Seconds, of the group of `--plain`; torch's own is 1800."""

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


def part(fleet: Fleet, link: Connection, seconds: float, kill_every: float, *, last: bool) -> dict[str, Any]:
    """Let the trainer work for a while; kill engines meanwhile, if `kill_every` is not 0."""
    end = time.monotonic() + seconds
    seats, moments = itertools.cycle(range(ENGINES)), itertools.cycle(("", CREATION, TRANSFER))
    due = time.monotonic() + (kill_every or seconds)
    while (now := time.monotonic()) < end:
        if not fleet.running["trainer"].is_alive():
            raise SystemExit("the trainer has ended")
        if now >= due:
            seat = next(seats)
            fleet.kill(seat)
            fleet.start_engine(seat, next(moments))
            due += kill_every
            print(f"{sum(fleet.kills.values()):4} kills, engine {seat} is started again", flush=True)
        time.sleep(0.01)
    link.send(None)
    story: dict[str, Any] = link.recv()
    link.send("end" if last else "go on")
    return story


def report(name: str, story: dict[str, Any]) -> float:
    """Say what happened in a part; returns its samples per second."""
    rate = float(story["samples"] / story["seconds"])
    print(
        f"{name:12} {rate:7.0f} samples/s, {story['steps']} steps, longest stall {story['stall']:.3f} s, "
        f"longest publish {1000 * story['publishing']:.1f} ms, stale {story['stale']}, mixed {story['mixed']}, "
        f"worlds that broke {story['lost']}, reward {story['reward']:.0f}",
        flush=True,
    )
    return rate


def compare(args: argparse.Namespace) -> int:
    """Run both parts."""
    with Fleet() as fleet:
        link, theirs = CONTEXT.Pipe()
        fleet.start("trainer", trainer, fleet.store, ENGINES, theirs)
        for seat in range(ENGINES):
            fleet.start_engine(seat)
        if not link.poll(PATIENCE):
            raise SystemExit(f"the engines were not there after {PATIENCE:.0f} s")
        link.recv()
        print(f"one trainer and {ENGINES} engines are there", flush=True)
        quiet = part(fleet, link, args.seconds, 0, last=False)
        before = report("undisturbed", quiet)
        fire = part(fleet, link, args.seconds, args.kill_every, last=True)
        after = report("with kills", fire)
        how = ", ".join(f"{number} {moment}" for moment, number in fleet.kills.items())
        print(
            f"{sum(fleet.kills.values())} kills ({how}); samples per second {after / before:.1%} of undisturbed"
        )
        return int(fire["stale"] + fire["mixed"] > 0)
    return 130  # Ctrl-C


def in_one_group(args: argparse.Namespace) -> int:
    """The same on plain torch.distributed."""
    with Fleet() as fleet:
        size = ENGINES + 1
        fleet.start("trainer", plain.trainer, fleet.store, size, PLAIN_TIMEOUT)
        for rank in range(1, size):
            fleet.start(rank, plain.engine, fleet.store, rank, size, PLAIN_TIMEOUT)
        time.sleep(max(5.0, args.kill_every))
        fleet.kill(1)
        print("kill -9 for engine 1", flush=True)
        fleet.running["trainer"].join(PATIENCE)
        return 0
    return 130


def main() -> int:
    """Start all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part, default 20")
    parser.add_argument("--kill-every", type=float, default=2.0, help="seconds, default 2")
    parser.add_argument("--plain", action="store_true", help="one group of plain torch.distributed")
    args = parser.parse_args()
    CONTEXT.set_forkserver_preload(LOADED)
    return in_one_group(args) if args.plain else compare(args)


if __name__ == "__main__":
    sys.exit(main())
