"""A leader in two worlds, and a worker in each: kill a worker, and the leader goes on with the other.

Left alone, each worker sends a number a second to the leader, which prints them; after a minute (--count 60) the workers
leave, and all three end with exit code 0.

The program is written with pymultiworld's names. In three terminals:

    python examples/multiworld_asyncio.py --rank 0
    python examples/multiworld_asyncio.py --rank 1
    python examples/multiworld_asyncio.py --rank 2

Then end rank 1 or 2 with Ctrl-C or kill -9. Start it again with the same line: the leader waits for it for a minute (--wait) in
the background, and takes it back into its world. Without it the leader ends with the other worker.
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C ends this process as a crash would)

import argparse
import asyncio
import os
import sys
import time

import torch

from multiworld.communicator import BrokenWorldException
from multiworld.errors import JoinAbandonedError, JoinError, MultiworldError
from multiworld.manager import WorldManager

WORLDS = {1: "world1", 2: "world2"}  # by the number of its worker


PATIENCE = 120.0  # seconds to start the others


async def initialize(
    manager: WorldManager, number: int, args: argparse.Namespace, timeout: float = PATIENCE
) -> None:
    """Join the world of worker `number`: the leader as rank 0, the worker as rank 1."""
    await manager.initialize_world(
        WORLDS[number],
        rank=0 if args.rank == 0 else 1,
        world_size=2,
        backend=args.backend,
        addr=args.addr,
        port=args.port
        + number,  # multiworld would let them share one port; pymultiworld wants one for each world
        timeout=timeout,
        device=torch.device(f"cuda:{args.rank}" if args.backend.startswith("nccl") else "cpu"),
    )
    print(f"rank {args.rank} is in {WORLDS[number]}", flush=True)


async def meet(manager: WorldManager, number: int, args: argparse.Namespace, timeout: float) -> None:
    """Join the world of worker `number`, again where the worker dies while it joins."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            await initialize(manager, number, args, timeout)
        except JoinAbandonedError as error:
            if time.monotonic() > deadline:
                raise
            print(f"{WORLDS[number]} is not there: {error}", flush=True)
            await asyncio.sleep(0.1)
        else:
            return


async def lead(manager: WorldManager, number: int, args: argparse.Namespace) -> int:
    """Receive from one worker until it leaves, and again if it was restarted; returns how many tensors came."""
    name, wait, count = WORLDS[number], PATIENCE, 0
    tensor = torch.zeros(1, device="cuda:0" if args.backend.startswith("nccl") else "cpu")
    while True:
        try:
            await meet(manager, number, args, wait)
            while True:
                await manager.communicator.recv(tensor, 1, name)
                count += 1
                print(f"received {tensor.item():g} from {name}", flush=True)
        except JoinError as error:
            print(f"{name} is given up: {error}", flush=True)
            return count
        except BrokenWorldException as error:
            print(f"{error} (after {count} tensors)", flush=True)
            if error.cause == "left":  # it has sent everything
                return count
        manager.remove_world(name)
        wait = args.wait
        print(f"waiting for --rank {number} to be started again, {wait:g} s", flush=True)


async def work(manager: WorldManager, args: argparse.Namespace) -> None:
    """Send 1, 2, 3, ... to the leader."""
    await initialize(manager, args.rank, args)
    tensor = torch.zeros(1, device=f"cuda:{args.rank}" if args.backend.startswith("nccl") else "cpu")
    for number in range(1, args.count + 1):
        tensor.fill_(number)
        await manager.communicator.send(tensor, 0, WORLDS[args.rank])
        print(f"rank {args.rank} sent {number}", flush=True)
        await asyncio.sleep(args.pause)


async def main(args: argparse.Namespace) -> None:
    """Be the leader, or one of the workers."""
    manager = WorldManager()
    if args.rank == 0:
        counts = await asyncio.gather(*(lead(manager, number, args) for number in WORLDS))
        print(f"no world is left; {sum(counts)} tensors came", flush=True)
        if not any(counts):
            sys.exit(1)
    else:
        await work(manager, args)
    manager.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--addr", default="127.0.0.1", help="of the leader")
    parser.add_argument("--port", type=int, default=29500, help="the worlds use the next two ports")
    parser.add_argument("--rank", type=int, choices=(0, 1, 2), required=True)
    parser.add_argument("--count", type=int, default=60, help="how many tensors a worker sends")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between them")
    parser.add_argument(
        "--wait", type=float, default=60, help="seconds that the leader waits for a worker that died"
    )
    print(f"pid {os.getpid()}", flush=True)
    try:
        asyncio.run(main(parser.parse_args()))
    except MultiworldError as error:
        sys.exit(f"{type(error).__name__}: {error}")
