"""The rounds of the collectives' examples: five processes, process 0 leads two worlds of three."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch

import multiworld as mw
from _common import BROKE, arguments, ended, join, leave, say
from _members import Members

__all__ = ["in_two_worlds", "show"]

WORLDS = {"world1": (0, 1, 2), "world2": (0, 3, 4)}
"""Which processes each world has, by rank."""


def show(world: mw.World, number: int, got: Any, expected: Any) -> None:
    """Print what an operation gave, and end the program if it is not what it should be."""
    if isinstance(got, torch.Tensor):
        got = got.tolist()
    say("%s round %d: rank %d has %s", world.name, number, world.rank, got)
    if got != expected:
        raise SystemExit(f"{world.name} round {number}: rank {world.rank} has {got}, expected {expected}")


def in_two_worlds(turn: Callable[[mw.World, int], Any], text: str | None) -> None:
    """Call ``turn(world, number)`` in every round in every world of this process; awaited if it is a coroutine.

    A broken world is left out from then on; the others do not notice.
    """
    args = arguments(text, 5, ("--rounds", 4), ("--pause", 0.3))
    ended(lambda: _start_five() if args.rank is None else _all_worlds(turn, args))


def _start_five() -> int:
    with Members() as members:
        for rank in range(5):
            members.start(rank)
        return members.wait()
    return 130  # Ctrl-C


def _all_worlds(turn: Callable[[mw.World, int], Any], args: argparse.Namespace) -> int:
    mine = {name: ranks for name, ranks in WORLDS.items() if args.rank in ranks}
    worlds = [join(args, name, ranks.index(args.rank), len(ranks)) for name, ranks in mine.items()]
    if inspect.iscoroutinefunction(turn):
        alive = asyncio.run(_all_rounds(turn, worlds, args))
    else:
        alive = worlds[:]
        for number in range(args.rounds):
            for world in alive[:]:
                try:
                    turn(world, number)
                except mw.BrokenWorldException as error:
                    say("%s", error)
                    alive.remove(world)
            time.sleep(args.pause)
    say(
        "done: %s",
        ", ".join(f"{w.name} {'ok' if w in alive or not w.breakage else w.breakage.cause}" for w in worlds),
    )
    for world in alive:
        leave(world)
    return 0 if alive else BROKE


async def _all_rounds(
    turn: Callable[[mw.World, int], Any], worlds: list[mw.World], args: Any
) -> list[mw.World]:
    async def rounds(world: mw.World) -> None:
        for number in range(args.rounds):
            await turn(world, number)
            await asyncio.sleep(args.pause)

    ends = await asyncio.gather(*map(rounds, worlds), return_exceptions=True)
    for end in ends:
        if isinstance(end, mw.BrokenWorldException):
            say("%s", end)
        elif end is not None:
            raise end
    return [world for world, end in zip(worlds, ends, strict=True) if end is None]
