"""A training of a sharded model (FSDP2) that loses members: shards come from replicas, or from a checkpoint.

Four processes train in two replicas of two shards (HSDP). One is killed: the other replica has its shard. The three
that are left have a shard each. One more is killed: its shard is nowhere, and the last checkpoint is loaded, sharded for
two. A newcomer comes: three shards are made of two. Then one process makes the same steps with the whole model, and the
losses are compared.

    python examples/elastic_fsdp.py                    both, and what they came to
    python examples/elastic_fsdp.py --record FILE      the losses, as JSON
    python examples/elastic_fsdp.py --rank 0           in terminals of their own (ranks 0 to 3, others later),
                                                       with --pause seconds (0.2) before each step, and
                                                       checkpoints in --folder (checkpoints), new for each run

It needs a file of scikit-learn: pip install --no-deps scikit-learn
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import multiworld as mw
from _common import arguments, ended, say
from _members import Members
from digits.alone import alone
from digits.data import digits
from digits.model import History, accuracy
from digits.sharding import Sharded
from digits.story import Progress, compared
from multiworld.elastic import ElasticBatchSampler

MEMBERS, BATCH, EPOCHS, SAVE_EVERY, TELL_EVERY = 4, 64, 10, 20, 25
KILLED, COMES = (1, 2), 4
"""Seats."""
STORY = {1: 30, 2: 70, COMES: 110}
"""What happens to them at which step."""
PAUSE = 0.015
"""Seconds before a step of the story: a larger model would take longer, and what happens takes time."""


class Trainer:
    """A member: what it trains, in the present generation and as the one before left it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, Path(args.folder)
        self.training, self.test = digits()
        self.history, self.sampler = History(), ElasticBatchSampler(len(self.training), BATCH)
        self.world = mw.join(
            "digits", None, f"1:{MEMBERS}", store=args.store, seat=str(args.rank),
            state={"sampler": self.sampler, "history": self.history},  # what is not sharded
        )  # fmt: skip
        if not self.world.step and any(self.folder.glob("*/.metadata")):
            raise SystemExit(
                f"{self.folder} has checkpoints of an earlier run: remove it, or name another --folder"
            )
        self.sampler.follow(self.world)
        self.progress = Progress.of(args)
        self.present: Any = None  # a Sharded
        self.generation = self.ended = 0
        self.made = 0  # steps of `present`; the history may be of another member, which has made others

    def train(self) -> None:
        """Train with the present members."""
        loader = DataLoader(self.training, batch_sampler=self.sampler)
        while True:
            try:
                if self.generation != self.world.generation:
                    self.begin()
                if self.sampler.epoch == EPOCHS:
                    self.end()
                    break
                for pixels, labels in loader:
                    time.sleep(self.args.pause)
                    with self.world:
                        loss = self.gradients(self.present, pixels, labels)
                    # From here on nothing can break off, and all have the gradients of this step.
                    self.present.optimizer.step()
                    self.history.steps.append([loss, self.world.world_size])
                    self.history.generation = self.generation
                    self.made += 1
                    self.ended += 1
                    if self.world.rank == 0:
                        self.progress.tell(self.world.step)
                        if self.world.step % TELL_EVERY == 0:
                            say("step %d: loss %.4f", self.world.step, loss)
                    if self.world.advance():
                        break
                    if len(self.history.steps) % SAVE_EVERY == 0:
                        with self.world:
                            place = self.sampler.state_dict()
                            self.present.save(self.folder, len(self.history.steps), place)
            except mw.BrokenWorldException as broken:
                say("%s in step %d", broken, len(self.history.steps))
                self.world.reform()
        self.world.close()

    def begin(self) -> None:
        """Begin a generation: shard the model over its members."""
        if self.present is not None and self.world.step > self.ended:
            if self.history.generation == self.generation:
                # This member broke off when others had the word that all have their gradients: it has them, too.
                self.present.optimizer.step()
                self.made += 1
            else:
                self.present = None  # it was away: the others made steps without it, and its shards are old
        self.ended = self.world.step
        with self.world:
            new = Sharded(self.world.world_size)
            step, saved = new.take_over(self.world, self.present, self.made, self.folder)
        if saved is not None:
            self.sampler.load_state_dict(saved)
            del self.history.steps[step:]
        self.present, self.generation, self.made = new, self.world.generation, len(self.history.steps)
        of = ", of the checkpoint" if saved is not None and step else ""
        say("%r, step %d%s", self.world, self.made, of)

    def gradients(self, present: Sharded, pixels: torch.Tensor, labels: torch.Tensor) -> float:
        """Make the gradients of a step; return the loss of all members' samples once all have them."""
        present.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(present.net(pixels), labels, reduction="sum") / BATCH
        (loss * self.world.world_size).backward()  # FSDP takes the mean of all members' gradients
        everyones = loss.detach()
        dist.all_reduce(everyones)
        return everyones.item()

    def end(self) -> None:
        """Tell what has come of it, once all have made the last step."""
        with self.world:
            found = accuracy(self.present.net, self.test)
        if self.world.rank == 0:
            self.progress.tell(self.world.step, {"steps": self.history.steps, "accuracy": found})
        self.world.barrier()


def member(args: argparse.Namespace) -> int:
    """Train, from where the others are."""
    torch.set_num_threads(1)
    if args.story and args.rank == COMES:
        Progress.of(args).wait(STORY[COMES])
    Trainer(args).train()
    return 0


def together() -> dict[str, Any]:
    """Train with members that are killed and come; returns what they came to."""
    with tempfile.TemporaryDirectory() as folder, Members("torch._dynamo") as members:
        for seat in range(MEMBERS + 1):
            members.start(seat, "--tell", "1", "--story", "1", "--pause", str(PAUSE), "--folder", folder)
        progress = Progress(members.store)
        for seat in KILLED:
            progress.wait(STORY[seat])
            members.kill(seat)
        if members.wait():
            raise SystemExit(1)
        return progress.result()
    raise SystemExit(130)  # Ctrl-C


def main() -> int:
    """Be a member, or start them."""
    options = (("--tell", 0), ("--story", 0), ("--pause", 0.2), ("--folder", "checkpoints"), ("--record", ""))
    args = arguments(__doc__, MEMBERS + 1, *options, gpus=False)
    if args.rank is not None:
        return member(args)
    disturbed = together()
    say("one process makes the same steps with the whole model")
    return compared(disturbed, alone(EPOCHS, BATCH), args.record)


if __name__ == "__main__":
    ended(main)
