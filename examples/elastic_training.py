"""A training that members come to and go from: handwritten digits, DistributedDataParallel, a DataLoader.

Three processes train. One is killed, a fourth comes, one leaves in good order. Then three others train undisturbed:
with the same samples in each step, the two losses are the same but for rounding.

    python examples/elastic_training.py                    both, and what they came to
    python examples/elastic_training.py --record FILE      the losses, as JSON
    python examples/elastic_training.py --workers 2        that read in advance, for each member
    python examples/elastic_training.py --rank 0           in terminals of their own (ranks 0 to 2, others later),
                                                           with --pause seconds (0.2) before each step

It needs a file of scikit-learn: pip install --no-deps scikit-learn
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import multiworld as mw
from _common import arguments, ended, say
from _members import Members
from digits.data import digits
from digits.model import History, accuracy, model
from digits.story import Progress, compared
from multiworld.elastic import ElasticBatchSampler

MEMBERS, BATCH, EPOCHS, TELL_EVERY = 3, 64, 12, 25
KILLED, LEAVES, COMES = 1, 2, 3
"""Seats."""
STORY = {KILLED: 40, COMES: 80, LEAVES: 180}
"""What happens to them at which step."""
PAUSE = 0.015
"""Seconds before a step of the story: a larger model would take longer, and what happens takes time."""


def member(args: argparse.Namespace) -> int:
    """Train with the present members, from the step at which they are."""
    torch.set_num_threads(1)
    training, test = digits()
    net, history = model(), History()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticBatchSampler(len(training), BATCH)
    if args.story and args.rank == COMES:
        Progress.of(args).wait(STORY[COMES])
    world = mw.join(
        "digits", None, f"1:{MEMBERS}", store=args.store, seat=str(args.rank),
        state={"net": net, "optimizer": optimizer, "sampler": sampler, "history": history},
    )  # fmt: skip
    say("%r, step %d", world, world.step)
    progress = Progress.of(args)
    sampler.follow(world)
    loader = DataLoader(
        training, batch_sampler=sampler, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    ddp: DistributedDataParallel | None = None
    while True:
        try:
            if ddp is None:  # here, as a member may be lost meanwhile
                ddp = DistributedDataParallel(net, process_group=world.elastic_group)
            if sampler.epoch == EPOCHS:
                if world.rank == 0:
                    progress.tell(world.step, {"steps": history.steps, "accuracy": accuracy(net, test)})
                world.barrier()  # a member that is lost before may leave the last step to be made again
                break
            for pixels, labels in loader:
                time.sleep(args.pause)
                if args.story and args.rank == LEAVES and world.step == STORY[LEAVES]:
                    world.leave()
                with world:
                    loss = nn.functional.cross_entropy(ddp(pixels), labels, reduction="sum") / BATCH
                    optimizer.zero_grad()
                    (loss * world.world_size).backward()  # DDP takes the mean of all members' gradients
                    loss = loss.detach()
                    dist.all_reduce(loss)
                # From here on nothing can break off: the step is made, or it is not.
                optimizer.step()
                history.steps.append([loss.item(), world.world_size])
                if world.rank == 0:
                    progress.tell(world.step)
                    if world.step % TELL_EVERY == 0:
                        say("step %d: loss %.4f", world.step, loss.item())
                if world.advance():
                    say("%r, step %d", world, world.step)
                    break  # the next batches are those of other members
        except mw.BrokenWorldException as broken:
            say("%s in step %d", broken, world.step)
            world.reform()
            say("%r, step %d", world, world.step)
        if world.state is mw.State.CLOSED:
            return 0  # it has left
    world.close()
    return 0


def run(story: int) -> dict[str, Any]:
    """Train once, with the story or without; returns what the members came to."""
    with Members("torch._dynamo") as members:
        for seat in range(MEMBERS + story):
            members.start(seat, "--tell", "1", "--story", str(story), "--pause", str(PAUSE * story))
        progress = Progress(members.store)
        if story:
            progress.wait(STORY[KILLED])
            members.kill(KILLED)
        if members.wait():
            raise SystemExit(1)
        return progress.result()
    raise SystemExit(130)  # Ctrl-C


def main() -> int:
    """Be a member, or start them."""
    options = (("--tell", 0), ("--story", 0), ("--pause", 0.2), ("--workers", 0), ("--record", ""))
    args = arguments(__doc__, MEMBERS + 1, *options, gpus=False)
    if args.rank is not None:
        return member(args)
    disturbed = run(1)
    say("the same undisturbed")
    return compared(disturbed, run(0), args.record)


if __name__ == "__main__":
    ended(main)
