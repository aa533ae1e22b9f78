"""Reinforcement learning with a trainer world and rollout worlds: an engine dies, another takes its place.

Trainers 0 and 1 share the world "trainers" and add up their gradients there. Each engine (2, 3) shares a world of
its own with trainer 0: weights go out, trajectories come back. When an engine dies, only its world breaks; training
does not stop, and a new engine joins under the old world's name and gets the newest weights.

    python examples/rl_weight_sync.py                             starts all, kills engine 3, starts another
    python examples/rl_weight_sync.py --rank 0 --steps 100000     in terminals of their own: trainer 0, which says when
                                                                  all end, and
    python examples/rl_weight_sync.py --rank 1                    ranks 1 to 3; 2 and 3 to be killed and started by you
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import argparse
import asyncio

import torch

import multiworld as mw
from _common import PATIENCE, alongside, arguments, cancel, ended, join, leave, say
from _members import Members
from rl.leader import STOP, Leader, word
from rl.learning import BATCH, Learner, Player

ENGINES = (2, 3)


def engine(args: argparse.Namespace) -> int:
    """Play with the weights that come, and send back what happened."""
    torch.set_num_threads(1)
    player = Player(torch.device(args.device or "cpu"))
    world = join(args, f"engine{args.rank}", 1, 2, PATIENCE)
    command = word(STOP, world.device)
    while True:
        world.broadcast(command, 0)
        if command.item() == STOP:
            break
        world.broadcast(player.weights, 0)
        world.send(player.play(), 0)
    leave(world)
    return 0


async def second_trainer(args: argparse.Namespace) -> int:
    """Trainer 1: learns from what trainer 0 hands on."""
    world = join(args, "trainers", 1, 2, PATIENCE)
    learner, command = Learner(world), word(STOP, world.device)
    batch = torch.empty(BATCH, device=world.device)
    while True:
        await world.aio.broadcast(command, 0)
        if command.item() == STOP:
            break
        await world.aio.broadcast(batch, 0)
        await learner.step(batch)
    same = await learner.same_everywhere()
    leave(world)
    return 0 if same else 1


async def lead(args: argparse.Namespace, members: Members | None) -> int:
    """Trainer 0. With `members` it also makes the fault; without, whoever sits there does."""
    trainers = await mw.join_async(
        "trainers", 0, 2, store=args.store, backend=args.backend, device=args.device, timeout=PATIENCE
    )
    say("%r", trainers)
    leader = Leader(args, trainers, len(ENGINES))
    engines = [asyncio.create_task(leader.serve(f"engine{number}")) for number in ENGINES]
    code = await alongside(tell(leader, members), engines)
    await asyncio.wait(engines, timeout=5)
    await cancel(engines)  # those that wait for an engine that never came back
    return code


async def tell(leader: Leader, members: Members | None) -> int:
    """Train through the loss of an engine."""
    steps, lost = leader.args.steps, ENGINES[-1]
    await asyncio.wait_for(leader.complete.wait(), PATIENCE)
    await leader.train(steps)
    before = sum(leader.rewards[:5]) / 5
    if members is not None:
        members.kill(lost)
        await leader.train(steps)
        members.start(lost)
        await asyncio.wait_for(leader.train(0, until=f"engine{lost}"), PATIENCE)
    await leader.train(steps)
    after = sum(leader.rewards[-20:]) / 20
    leader.stop = True
    same = await leader.finish()
    say("reward %.2f to %.2f, weights %s", before, after, "the same" if same else "DIFFER")
    return 0 if same and after > before else 1


def main() -> int:
    """Be a trainer, an engine, or start all of them."""
    args = arguments(__doc__, 4, ("--steps", 150))
    if args.rank == 0:
        return asyncio.run(lead(args, None))
    if args.rank == 1:
        return asyncio.run(second_trainer(args))
    if args.rank is not None:
        return engine(args)
    with Members() as members:
        args.store = f"tcp://127.0.0.1:{members.store.port}"
        for rank in (1, *ENGINES):
            members.start(rank)
        return max(asyncio.run(lead(args, members)), members.wait())
    return 130  # Ctrl-C


if __name__ == "__main__":
    ended(main)
