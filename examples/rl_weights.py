"""Reinforcement learning whose engines are killed: CartPole, one trainer, four rollout engines.

The trainer publishes its policy after each step (`multiworld.weights`); each engine plays with the newest version
it was told, whole, and sends what happened in a world of its own. Undisturbed seconds and seconds with kills take
turns: an engine is killed with SIGKILL every `--kill-every` seconds and started again; of the new ones some die in
group creation, and some in the middle of a transfer of weights. At the end it says what the trainer noticed of that.

    python examples/rl_weights.py                      10 s undisturbed, 10 s with kills, twice
    python examples/rl_weights.py --rounds 12          12 times: about 100 kills
    python examples/rl_weights.py --plain              the same on plain torch.distributed, until the first kill
    python examples/rl_weights.py --plot FILE          one after the other, and a picture of both

It needs gymnasium, and matplotlib for the picture: pip install '.[examples]'
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import argparse
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from cartpole import picture, plain
from cartpole.fleet import CONTEXT, ENGINES, LOADED, PATIENCE, Fleet
from cartpole.trainer import FRESH, trainer

PLAIN_TIMEOUT = 20.0
"""Seconds, of the group of `--plain`; torch's own is 1800."""


def part(fleet: Fleet, link: Connection, seconds: float, kill_every: float, *, last: bool) -> dict[str, Any]:
    """Let the trainer work for a while; kill engines meanwhile, if `kill_every` is not 0."""
    end = time.monotonic() + seconds
    due = time.monotonic() if kill_every else end
    told = 0.0
    while (now := time.monotonic()) < end:
        if not fleet.running["trainer"].is_alive():
            raise SystemExit("the trainer has ended")
        if now > told + 3 and not kill_every:
            print(f"undisturbed for {end - now:.0f} s more", flush=True)
            told = now
        if now >= due:
            seat = next(fleet.seats)
            fleet.kill(seat)
            fleet.start_engine(seat, next(fleet.moments))
            due += kill_every
            print(f"{fleet.killed():4} kills, engine {seat} is started again", flush=True)
        time.sleep(0.01)
    link.send(None)
    story: dict[str, Any] = link.recv()
    link.send("end" if last else "go on")
    return story


def together(before: dict[str, Any], story: dict[str, Any]) -> dict[str, Any]:
    """Two parts as one: sums, the longest, and the last reward."""
    longest = {name: max(story[name], before.get(name, 0)) for name in ("stall", "publishing")}
    sums = {name: value + before.get(name, type(value)()) for name, value in story.items()}
    return {**sums, **longest, "reward": story["reward"]}


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


def compare(args: argparse.Namespace) -> tuple[int, picture.Run]:
    """Run both parts; returns the exit code, and what happened when."""
    with Fleet() as fleet:
        link, theirs = CONTEXT.Pipe()
        fleet.start("trainer", trainer, fleet.store, ENGINES, theirs, args.fresh)
        for seat in range(ENGINES):
            fleet.start_engine(seat)
        if not link.poll(PATIENCE):
            raise SystemExit(f"the engines were not there after {PATIENCE:.0f} s")
        link.recv()
        print(f"one trainer and {ENGINES} engines are there", flush=True)
        began = time.monotonic()
        quiet: dict[str, Any] = {}
        fire: dict[str, Any] = {}
        for left in range(args.rounds - 1, -1, -1):
            quiet = together(quiet, part(fleet, link, args.seconds, 0, last=False))
            fire = together(fire, part(fleet, link, args.seconds, args.kill_every, last=not left))
        before, after = report("undisturbed", quiet), report("with kills", fire)
        how = ", ".join(f"{len(times)} {moment}" for moment, times in fleet.kills.items())
        print(f"{fleet.killed()} kills ({how}); samples per second {after / before:.1%} of undisturbed")
        steps = sorted(quiet["times"] + fire["times"])
        code = int(fire["stale"] + fire["mixed"] > 0)
        return code, picture.Run(began, time.monotonic(), steps, fleet.kills)
    raise SystemExit(130)  # Ctrl-C


def in_one_group(args: argparse.Namespace) -> picture.Run:
    """The same on plain torch.distributed, until the first kill; returns what happened when."""
    with Fleet() as fleet:
        size = ENGINES + 1
        link, theirs = CONTEXT.Pipe()
        fleet.start("trainer", plain.trainer, fleet.store, size, PLAIN_TIMEOUT, theirs)
        for rank in range(1, size):
            fleet.start(rank, plain.engine, fleet.store, rank, size, PLAIN_TIMEOUT)
        for _ in range(2 * ENGINES):  # warm
            if not link.poll(PATIENCE):
                raise SystemExit(f"the group made no step in {PATIENCE:.0f} s")
            link.recv()
        print(f"one group of plain torch.distributed is there; {args.seconds:g} s undisturbed", flush=True)
        began, steps = time.monotonic(), []
        while (left := began + args.seconds - time.monotonic()) > 0:
            if link.poll(left):
                steps.append(link.recv())
                if len(steps) % 20 == 0:
                    print(f"step {len(steps)}", flush=True)
        fleet.kill(1)
        print("kill -9 for engine 1", flush=True)
        fleet.running["trainer"].join(PATIENCE)
        return picture.Run(began, time.monotonic(), steps, fleet.kills)
    raise SystemExit(130)  # Ctrl-C


def main() -> int:
    """Start all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part, default 10")
    parser.add_argument("--rounds", type=int, default=2, help="of both parts, default 2")
    parser.add_argument("--kill-every", type=float, default=2.0, help="seconds, default 2")
    parser.add_argument(
        "--fresh", type=float, default=FRESH, help=f"seconds until older weights are stale, default {FRESH:g}"
    )
    parser.add_argument("--plain", action="store_true", help="one group of plain torch.distributed")
    parser.add_argument(
        "--plot", metavar="FILE", help="write a picture of both (.svg, .png): needs matplotlib"
    )
    args = parser.parse_args()
    CONTEXT.set_forkserver_preload(LOADED)
    print(f"one trainer and {ENGINES} engines start", flush=True)
    if args.plain:
        in_one_group(args)
        return 0
    code, worlds = compare(args)
    if args.plot:
        picture.draw(args.plot, worlds, in_one_group(args))
    return code


if __name__ == "__main__":
    sys.exit(main())
