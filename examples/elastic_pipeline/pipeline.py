"""A pipeline that loses workers and goes on: three stages with two replicas each, requests flowing through.

    m8d-run --worlds examples/elastic_pipeline/worlds.toml --max-restarts 100 examples/elastic_pipeline/pipeline.py

The front prints what came back each second, and who runs where. Kill any worker by hand (`kill -9 PID`): the rate dips,
the launcher starts that worker again, alone, and the rate returns. No other process stops, and no request is lost
but those that were inside the dead worker. `kill -USR1 PID` of the front ends the run early; `--help` after the
script's name shows its options.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time

# Ctrl-C ends this process at once, without a traceback; torch is loaded after it.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from stage import PATIENCE, ROOM, WIDTH, Stage, finish

import multiworld as mw


def say(line: str) -> None:
    """Print a line in one write: print() makes two where PYTHONUNBUFFERED is set, and the workers' lines mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Front(Stage):
    """Sends numbered requests, takes answers, counts."""

    def __init__(self, worlds: dict[str, mw.World], seconds: float, rate: float) -> None:
        super().__init__(worlds)
        self.seconds, self.rate = seconds, rate
        self.flying: set[int] = set()
        self.done: set[int] = set()
        self.wrong = 0
        self.number = 0
        self.ending = asyncio.Event()

    async def arrived(self, request: torch.Tensor) -> None:
        """An answer: it must be its request, plus 1 from each of three stages."""
        number = int(request[0].item())
        self.room.release()
        self.flying.discard(number)
        self.done.add(number)
        self.wrong += not bool((request[1:] == number + 3).all())

    def sent(self) -> None:
        """What is under way takes no room here."""

    async def produce(self) -> None:
        """Make requests at the rate asked for, as long as somebody takes them."""
        start = time.monotonic()
        while (passed := time.monotonic() - start) < self.seconds and not self.ending.is_set():
            while self.number < self.rate * passed and self.ready.qsize() < ROOM:
                request = torch.full((1 + WIDTH,), float(self.number), dtype=torch.float64)
                self.flying.add(self.number)
                self.number += 1
                await self.ready.put(request)
            await asyncio.sleep(0.005)

    async def report(self) -> None:
        """Say once a second how it goes."""
        before = 0
        while True:
            await asyncio.sleep(1)
            away = [
                world.name for world in (*self.inputs, *self.outputs) if world.state is not mw.State.ACTIVE
            ]
            say(f"{len(self.done) - before} requests/s" + (f", away: {', '.join(away)}" if away else ""))
            before = len(self.done)

    async def run(self) -> None:
        """Send for some seconds, wait for the answers, leave; the stages follow one after the other."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.ending.set)
        talking = asyncio.create_task(self.report())
        senders = [asyncio.create_task(self.send(world)) for world in self.outputs]
        receivers = [asyncio.create_task(self.receive(world)) for world in self.inputs]
        await self.produce()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.answered(), 10)
        await finish(senders)
        for world in self.outputs:
            world.close()
        talking.cancel()
        await asyncio.wait(receivers, timeout=PATIENCE)
        lost = self.number - len(self.done)
        say(
            f"{self.number} requests, {len(self.done)} answered, {self.wrong} wrong, "
            f"{lost} were inside workers that died"
        )

    async def answered(self) -> None:
        """Wait until nothing is under way, or nothing has come for two seconds."""
        count, since = -1, time.monotonic()
        while self.flying and time.monotonic() < since + 2:
            if len(self.done) != count:
                count, since = len(self.done), time.monotonic()
            await asyncio.sleep(0.02)


async def main() -> int:
    """Join the worlds of this process and play its part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30, help="how long requests are sent (default 30)")
    parser.add_argument("--rate", type=float, default=300, help="requests per second (default 300)")
    args = parser.parse_args()
    role, place = os.environ["ROLE_NAME"], os.environ["ROLE_RANK"]
    ends = time.monotonic() + args.seconds
    while True:
        try:
            worlds = await mw.join_all_async()
            break
        except mw.JoinTimeoutError:
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise
            # It was killed near the run's end, and its neighbours have ended: one that ends with 0 is not started
            # again. Before the end they come, though their node may take longer than the join's 30 s.
            if time.monotonic() > ends:
                say(f"{role}:{place} ends: its neighbours did not come")
                return 0
    say(f"{role}:{place} is there, pid {os.getpid()}, in {', '.join(worlds)}")
    part = Front(worlds, args.seconds, args.rate) if role == "front" else Stage(worlds)
    await part.run()
    for world in worlds.values():
        world.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
