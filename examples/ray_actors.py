"""Ray's actors in worlds: a trainer and its rollout engines; one engine is killed, and Ray starts it again.

The trainer shares a world of two with each engine: weights go out, gradients come back. When an engine's process is
killed, its world breaks; the others go on. Ray restarts the actor, its `__init__` joins again, and the world is
active in its next generation.

    python examples/ray_actors.py                     starts Ray on this machine; ends by itself
    python examples/ray_actors.py --address auto      in a running cluster whose nodes have multiworld installed
    python examples/ray_actors.py --steps 400 --plot FILE        longer, and a picture

It needs Ray, and matplotlib for the picture: pip install '.[ray,examples]'
"""

from __future__ import annotations

import _ctrl_c  # first: Ctrl-C is quiet from here on

import argparse
import asyncio
import sys
import time
from typing import NamedTuple

import ray
import torch

import _picture
import multiworld as mw
from multiworld.integrations.ray import RayStore, join, serve_store

ENGINES = ("red", "green", "blue")
KILLED = "green"
SIZE = 10_000
PATIENCE = 180.0
BEGAN = time.time()


def say(text: str, at: float | None = None) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{(at or time.time()) - BEGAN:5.1f} s] {text}", flush=True)


class Report(NamedTuple):
    """What the trainer has seen, by engine."""

    steps: dict[str, int]
    generations: dict[str, int]
    pids: dict[str, int]
    broken: dict[str, tuple[float, str]]  # when, and why
    longest: dict[str, float]  # seconds between two gradients
    times: dict[str, list[float]]  # when each gradient came


class Engine:
    """Plays with the weights that come, and sends back a gradient. Ray calls `__init__` again after a restart."""

    def __init__(self, store: RayStore, name: str) -> None:
        self.world = join(name, 1, 2, store, hang_timeout=3)

    def play(self) -> int:
        """Play until the trainer stops; the number of rounds. Ray calls this again after a restart as well."""
        weights, rounds = torch.empty(SIZE), 0
        while True:
            self.world.recv(weights, src=0)
            if weights[0].isnan():
                self.world.close()
                return rounds
            time.sleep(0.01)  # as long as a game lasts
            self.world.send(weights - 1 + 0.1 * torch.randn(SIZE), dst=0)  # the best weights are ones
            rounds += 1


class Trainer:
    """Learns from all engines at once, each served by a task of its own."""

    def __init__(self, store: RayStore, names: tuple[str, ...]) -> None:
        self.weights = torch.zeros(SIZE)
        self.worlds = {name: join(name, 0, 2, store, hang_timeout=3) for name in names}
        self.steps = dict.fromkeys(names, 0)
        self.longest = dict.fromkeys(names, 0.0)
        self.times: dict[str, list[float]] = {name: [] for name in names}
        self.broken: dict[str, tuple[float, str]] = {}
        self.stopping = False

    async def train(self) -> float:
        """Train until `stop`; the error that is left."""
        await asyncio.gather(*map(self.serve, self.worlds))
        return float((self.weights - 1).abs().mean())

    async def serve(self, name: str) -> None:
        """Send weights to one engine and take its gradients, over generations of its world."""
        world, gradient, last = self.worlds[name], torch.empty(SIZE), time.monotonic()
        while not self.stopping:
            try:
                await world.aio.send(self.weights, dst=1)
                await world.aio.recv(gradient, src=1)
            except mw.BrokenWorldException as error:
                self.broken[name] = time.time(), str(error.detail)
                await asyncio.to_thread(world.wait_active, PATIENCE)
                continue
            # A new tensor: other tasks may be sending the one before.
            self.weights = self.weights - 0.01 * gradient
            self.steps[name] += 1
            self.times[name].append(time.time())
            now = time.monotonic()
            self.longest[name], last = max(self.longest[name], now - last), now
        await world.aio.send(torch.full((SIZE,), torch.nan), dst=1)

    async def seen(self) -> Report:
        """What has happened so far."""
        generations = {name: world.generation for name, world in self.worlds.items()}
        pids = {name: world.members[1].pid for name, world in self.worlds.items()}
        return Report(self.steps, generations, pids, self.broken, self.longest, self.times)

    async def stop(self) -> None:
        """Let `train` return."""
        self.stopping = True


def draw(file: str, seen: Report, killed: float, returned: float) -> None:
    """Draw gradients per second of each engine over time."""
    began = min(times[0] for times in seen.times.values())
    ended = max(times[-1] for times in seen.times.values())
    canvas, (axes,) = _picture.panels(f"One trainer, three engines: the actor {KILLED!r} is killed", 2.6)
    colours = zip(ENGINES, (_picture.RED, _picture.GREEN, _picture.BLUE), ("-", "-", "--"), strict=True)
    for name, colour, line in colours:
        middles, rates = _picture.rates((at - began for at in seen.times[name]), ended - began, 0.5)
        axes.plot(middles, rates, line, color=colour, label=name, linewidth=2.2 if name == KILLED else 1.4)
    axes.axvspan(killed - began, returned - began, color="#E4E4E4", zorder=0)
    axes.axvline(killed - began, color="#333333", linewidth=1)
    axes.set_xlabel(f"seconds; grey: {KILLED} is killed, and Ray starts it again")
    axes.set_ylabel("gradients per second")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.set_xlim(0, ended - began)
    axes.legend(loc="upper center", ncols=3)
    _picture.save(canvas, file)


def play(args: argparse.Namespace) -> int:
    """Start the actors, kill one, and look at what the others noticed."""
    say("Ray starts")
    here = {"num_cpus": 2, "include_dashboard": False} if args.address == "local" else {}
    ray.init(args.address, log_to_driver=False, logging_level="ERROR", **here)
    say("Ray is there")
    store = serve_store()
    # Ray repeats a call that a restart has interrupted: the engine plays on.
    kind = ray.remote(num_cpus=0.5, max_restarts=-1, max_task_retries=-1)(Engine)
    engines = {name: kind.remote(store, name) for name in ENGINES}
    trainer = ray.remote(num_cpus=0.5)(Trainer).remote(store, ENGINES)
    playing, training = [engine.play.remote() for engine in engines.values()], trainer.train.remote()

    def until(steps: dict[str, int], generation: int) -> Report:
        """Wait until each engine has made so many steps, and the killed one's world is in this generation."""
        told = time.time()
        deadline = told + PATIENCE
        while time.time() < deadline:
            asked = trainer.seen.remote()
            while not ray.wait([asked], timeout=4)[0] and time.time() < deadline:
                say("the trainer starts")
            seen: Report = ray.get(asked, timeout=4)
            if seen.generations[KILLED] >= generation and all(seen.steps[n] >= steps[n] for n in ENGINES):
                return seen
            if time.time() > told + 4:
                told = time.time()
                say(f"steps by engine {seen.steps}")
            time.sleep(0.05)
        raise TimeoutError(f"not so far after {PATIENCE:g} s: steps by engine {seen.steps}")

    say("the trainer and its engines start")
    before = until(dict.fromkeys(ENGINES, args.steps), 1)
    say(f"steps by engine {before.steps}; kill {KILLED}, pid {before.pids[KILLED]}")
    killed = time.time()
    ray.kill(engines[KILLED], no_restart=False)
    back = until({**before.steps, KILLED: before.steps[KILLED] + 1}, 2)
    when, why = back.broken[KILLED]
    say(f"world {KILLED!r} broke: {why}", when)
    returned = time.time()
    say(f"world {KILLED!r} is active again, generation {back.generations[KILLED]}, pid {back.pids[KILLED]}")
    after = until({name: count + args.steps for name, count in back.steps.items()}, 2)
    ray.get(trainer.stop.remote())
    error = ray.get(training, timeout=PATIENCE)
    ray.get(playing, timeout=PATIENCE)
    others = [name for name in ENGINES if name != KILLED]
    meanwhile = {name: back.steps[name] - before.steps[name] for name in others}
    longest = max(after.longest[name] for name in others)
    say(f"steps by engine {after.steps}, {meanwhile} of them without {KILLED}")
    say(
        f"longest pause of the others {longest:.3f} s, of {KILLED} {after.longest[KILLED]:.3f} s; error {error:.3f}"
    )
    if args.plot:
        draw(args.plot, after, killed, returned)
    good = (
        set(after.broken) == {KILLED}
        and all(after.generations[name] == 1 for name in others)
        and min(meanwhile.values()) > 10
        and longest < after.longest[KILLED]
        and error < 0.1
    )
    say("as it should be" if good else "NOT as it should be")
    return 0 if good else 1


def main() -> int:
    """Read the command line and play; Ctrl-C ends Ray, too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", default="local", help="of a Ray cluster (default: start one here)")
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="of each engine before the kill, and after the return (default 100)",
    )
    parser.add_argument("--plot", metavar="FILE", help="write a picture (.svg, .png): needs matplotlib")
    args = parser.parse_args()
    _ctrl_c.raises()
    try:
        return play(args)
    except KeyboardInterrupt:
        return _ctrl_c.CODE
    finally:
        with _ctrl_c.kept_back():
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
