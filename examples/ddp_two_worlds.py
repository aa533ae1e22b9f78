"""One process trains two models with DistributedDataParallel at the same time, each with another partner.

Process 0 is in the worlds "sum" (with process 1) and "difference" (with process 2), one thread for each; torch is
unmodified inside `with world:`. Kill process 1 or 2, and the other model trains on.

    python examples/ddp_two_worlds.py
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiworld as mw
from _common import BROKE, arguments, ended, join, leave, say
from _members import Members

PARTNERS = {"sum": 1, "difference": 2}
WEIGHTS = {"sum": [1.0, 1.0], "difference": [1.0, -1.0]}


def examples(name: str, source: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pairs of numbers, and what the model of this world is to say for them."""
    pairs = torch.rand(64, 2, generator=source) * 2 - 1
    return pairs.to(device), (pairs @ torch.tensor(WEIGHTS[name]))[:, None].to(device)


def train(name: str, args: argparse.Namespace) -> bool:
    """Train the model of one world; returns whether it came to its end with the same weights on both members."""
    world = join(args, name, 0 if args.rank == 0 else 1, 2)
    try:
        with world:
            good = train_here(name, args, world.device)
    except mw.BrokenWorldException as error:
        say("%s", error)
        return False
    leave(world)
    return good


def train_here(name: str, args: argparse.Namespace, device: torch.device) -> bool:
    """Nothing below knows of worlds: this is a program for torch.distributed as it is."""
    torch.manual_seed(
        dist.get_rank()
    )  # the members begin with different weights: DDP gives everyone rank 0's
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(100 + dist.get_rank())  # each member has its own data
    first = loss = torch.zeros(())
    for step in range(args.steps):
        pairs, wanted = examples(name, source, device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(pairs), wanted)
        loss.backward()
        optimizer.step()
        if step == 0:
            first = loss.detach()
        if step % max(1, args.steps // 4) == 0:
            say("%s step %d: loss %.4f", name, step, loss.item())
        time.sleep(args.pause)
    mine = nn.utils.parameters_to_vector(net.parameters()).detach()
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    same = all(torch.equal(each, mine) for each in everyones)
    say(
        "%s: loss %.4f to %.4f, weights %s",
        name,
        first.item(),
        loss.item(),
        "the same on both" if same else "differ",
    )
    return same and bool(loss < first / 4)


def main() -> int:
    """Train in all worlds of this process at once."""
    args = arguments(__doc__, 3, ("--steps", 200), ("--pause", 0.0))
    if args.rank is None:
        with Members("torch._dynamo") as members:
            for rank in range(3):
                members.start(rank)
            return members.wait()
        return 130  # Ctrl-C
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    mine = [name for name, partner in PARTNERS.items() if args.rank in (0, partner)]
    with ThreadPoolExecutor(len(mine)) as threads:
        good = list(threads.map(lambda name: train(name, args), mine))
    broken = [name for name, world in mw.worlds().items() if world.breakage is not None]
    say(
        "done: %s",
        ", ".join(
            f"{n} {'broke' if n in broken else 'ok' if g else 'WRONG'}"
            for n, g in zip(mine, good, strict=True)
        ),
    )
    if not all(g or n in broken for n, g in zip(mine, good, strict=True)):
        return 1
    return BROKE if len(broken) == len(mine) else 0


if __name__ == "__main__":
    ended(main)
