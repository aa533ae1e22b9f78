"""Functions that the examples share: arguments, output, joining and leaving, quiet endings."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import multiworld as mw

__all__ = ["BROKE", "PATIENCE", "alongside", "arguments", "cancel", "ended", "join", "leave", "say"]

T = TypeVar("T")

BROKE = 3
"""Exit code of a process whose last world broke."""

PATIENCE = 120.0
"""Seconds to start, or to start again, what has to be there."""

say = logging.getLogger("example").info


def arguments(
    text: str | None, processes: int, *options: tuple[str, Any], gpus: bool = True
) -> argparse.Namespace:
    """Read the command line; `options` are further ones, by name and default. Without `gpus` there is no --backend."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if gpus:
        told = "gloo (default) or nccl, which needs a GPU per process"
        parser.add_argument("--backend", default="gloo", help=told)
    parser.add_argument("--addr", default="127.0.0.1", help="the host of process 0, which serves the store")
    parser.add_argument("--port", type=int, default=29500, help="of the store")
    parser.add_argument(
        "--rank", type=int, help=f"be process 0 to {processes - 1}; without it all start here"
    )
    for name, default in options:
        parser.add_argument(name, type=type(default), default=default, help=f"default {default}")
    args = parser.parse_args()
    args.store = f"tcp://{args.addr}:{args.port}"
    if gpus:
        args.device = f"cuda:{args.rank or 0}" if args.backend.startswith("nccl") else None
    who = "start" if args.rank is None else args.rank
    logging.basicConfig(format=f"[{who}] %(message)s", level=logging.INFO, stream=sys.stdout)
    if args.rank is not None:
        # Ctrl-C ends this process at once (_ctrl_c), and the others see a crash, which is what these examples are about.
        say("process %d, pid %d", args.rank, os.getpid())
    return args


def join(args: argparse.Namespace, name: str, rank: int, world_size: int, timeout: float = 60) -> mw.World:
    """Join a world of this example and say so."""
    world = mw.join(
        name, rank, world_size, store=args.store, backend=args.backend, timeout=timeout, device=args.device
    )
    say("%r", world)
    return world


def leave(world: mw.World) -> None:
    """Close the world when everyone is done with it: who leaves earlier breaks it for those who are not."""
    try:
        world.barrier()
    except mw.BrokenWorldException as error:
        say("%s", error)  # somebody died, or was a moment quicker to leave
    world.close()


def ended(main: Callable[[], int]) -> None:
    """Run `main` and end with its exit code; an error of multiworld is told without a traceback."""
    try:
        code = main()
    except mw.MultiworldError as error:
        say("%s: %s", type(error).__name__, error)
        code = BROKE if isinstance(error, mw.BrokenWorldException) else 1
    except asyncio.TimeoutError:
        say("not everyone was there within %.0f s", PATIENCE)
        code = 1
    sys.exit(code)


async def alongside(story: Coroutine[Any, Any, T], tasks: list[asyncio.Task[None]]) -> T:
    """Await `story`; a task that fails meanwhile fails it."""
    main = asyncio.ensure_future(story)
    try:
        done, _ = await asyncio.wait([main, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
        return await main
    except BaseException:
        await cancel([main, *tasks])  # after Ctrl-C, too: else asyncio logs what has failed in them
        raise


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """End tasks that nobody needs any more; a join that is under way is undone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
