"""The rounds of the collectives' examples: five processes, process 0 leads two worlds of three."""

from __future__ import annotations

import argparse
import asyncio
import inspect
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

    Each world goes its own way: one that cannot come about, or breaks, does not keep the others waiting.
    """
    args = arguments(text, 5, ("--rounds", 4), ("--pause", 0.3))
    ended(lambda: _start_five() if args.rank is None else asyncio.run(_all_worlds(turn, args)))


def _start_five() -> int:
    with Members() as members:
        for rank in range(5):
            members.start(rank)
        return members.wait()
    return 130  # Ctrl-C


async def _all_worlds(turn: Callable[[mw.World, int], Any], args: argparse.Namespace) -> int:
    mine = [name for name, ranks in WORLDS.items() if args.rank in ranks]
    ends = await asyncio.gather(*(_one_world(name, turn, args) for name in mine))
    say("done: %s", ", ".join(f"{name} {end}" for name, end in zip(mine, ends, strict=True)))
    return 0 if "ok" in ends else BROKE


async def _one_world(name: str, turn: Callable[[mw.World, int], Any], args: argparse.Namespace) -> str:
    ranks = WORLDS[name]
    try:
        world = await asyncio.to_thread(join, args, name, ranks.index(args.rank), len(ranks))
        for number in range(args.rounds):
            if inspect.iscoroutinefunction(turn):
                await turn(world, number)
            else:
                await asyncio.to_thread(turn, world, number)
            await asyncio.sleep(args.pause)
    except (mw.JoinAbandonedError, mw.JoinTimeoutError) as error:  # another process was killed, or never came
        say("%s", error)
        return "not joined"
    except mw.BrokenWorldException as error:
        say("%s", error)
        return str(error.cause)
    await asyncio.to_thread(leave, world)
    return "ok"
