"""A leader spreads images over workers that run a ResNet-18; each worker is a world of its own with the leader.

A worker dies: its images go to another, none is lost and none counted twice. It comes back under its world's name.

    python examples/resnet_serving.py                             starts two workers, kills one, starts it again
    python examples/resnet_serving.py --rank 0 --images 100000    in terminals of their own: the leader, and
    python examples/resnet_serving.py --rank 1                    workers 1 to --workers, to be killed and started by you

`--folder PATH` classifies the images in a folder (with Pillow installed) instead of generated ones.
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import argparse
import asyncio
import contextlib
import time

import torch

import multiworld as mw
from _common import PATIENCE, alongside, arguments, cancel, ended, join, leave, say
from _members import Members
from resnet import images
from resnet.desk import Desk
from resnet.model import build

CLASSES = 1000


def work(args: argparse.Namespace) -> int:
    """A worker: classify what comes until the leader says that there is no more."""
    torch.set_num_threads(1)  # workers on one host share its cores
    device = torch.device(args.device or "cpu")
    model = build(device)
    while True:
        world = join(args, f"worker{args.rank}", 1, 2)
        count = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            with torch.inference_mode():
                while world.recv(count, 0) == 0 and count.item():
                    pictures = torch.empty(int(count.item()), 3, images.SIDE, images.SIDE, device=device)
                    world.recv(pictures, 0)
                    world.send(model(pictures), 0)
        except mw.BrokenWorldException as error:
            say("%s; joining again", error)  # if the leader is gone for good, the join ends with an error
            continue
        leave(world)
        return 0


async def employ(args: argparse.Namespace, desk: Desk, name: str) -> None:
    """Join a worker's world and give it images; when the worker is lost, wait for it to come back."""
    while True:
        try:
            world = await mw.join_async(
                name,
                0,
                2,
                store=args.store,
                backend=args.backend,
                timeout=60,
                hang_timeout=2,
                device=args.device,
            )
        except mw.JoinError as error:
            say("%s is not there: %s", name, type(error).__name__)
            if not desk.present and not isinstance(error, mw.JoinAbandonedError):
                raise
            await asyncio.sleep(0.1)
            continue
        say("%s is here, generation %d", name, world.generation)
        await desk.worker(name, present=True)
        try:
            while True:
                await one_batch(args, desk, world)
        except mw.BrokenWorldException as error:
            say("%s: %s", error.cause, error)
            await desk.worker(name, present=False)


async def one_batch(args: argparse.Namespace, desk: Desk, world: mw.World) -> None:
    """Send one batch of images and receive its scores."""
    numbers = await desk.take()
    scores = torch.empty(len(numbers), CLASSES, device=world.device)
    try:
        await world.aio.send(torch.tensor([len(numbers)], device=world.device), 1)
        await world.aio.send(images.batch(numbers, args.paths).to(world.device), 1)
        await world.aio.recv(scores, 1)
    except mw.BrokenWorldException:
        say("images %d to %d go to another worker", numbers[0], numbers[-1])
        await desk.give_back(numbers)
        raise
    await desk.finish(numbers, scores)


async def lead(args: argparse.Namespace, members: Members | None) -> int:
    """The leader. With `members` it also makes the fault; without, whoever sits there does."""
    torch.set_num_threads(1)
    desk = Desk(args.batch, args.workers)
    tasks = [asyncio.create_task(employ(args, desk, f"worker{n}")) for n in range(1, args.workers + 1)]
    await alongside(tell(args, desk, members), tasks)
    await cancel(tasks)
    for world in mw.worlds().values():
        with contextlib.suppress(mw.BrokenWorldException):
            world.send(torch.zeros(1, dtype=torch.int64, device=world.device), 1)
        leave(world)
    return report(args, desk)


async def tell(args: argparse.Namespace, desk: Desk, members: Members | None) -> None:
    """Before, during and after a fault."""
    await asyncio.wait_for(desk.wait_complete(1), PATIENCE)
    await desk.wait_images(args.images)
    if members is not None:
        members.kill(1)
        await desk.wait_images(args.images)
        members.start(1)
        await asyncio.wait_for(desk.wait_complete(2), PATIENCE)
        await desk.wait_images(args.images)
    await desk.close()


def report(args: argparse.Namespace, desk: Desk) -> int:
    """Print the rates, and compare samples with what the model says here."""
    for phase in desk.phases:
        if phase.images:
            say("%s", phase)
    model = build(torch.device("cpu"))
    wrong = 0
    with torch.inference_mode():
        for numbers, scores in desk.samples.items():
            here = model(images.batch(numbers, args.paths))
            wrong += not torch.allclose(scores, here, rtol=1e-2, atol=1e-2 * float(here.abs().max()))
    missing = len(desk.missing())
    say("%d images, %d sent again, %d not done exactly once", len(desk.done), desk.rerouted, missing)
    say("%d batches compared with the model here: %d differ", len(desk.samples), wrong)
    return int(bool(wrong or missing or not desk.samples))


def main() -> int:
    """Be the leader, a worker, or start all of them."""
    args = arguments(__doc__, 3, ("--workers", 2), ("--images", 150), ("--batch", 4), ("--folder", ""))
    if args.rank:
        return work(args)
    args.paths = images.files(args.folder)
    images.batch([0], args.paths)  # what is missing is said now, and not in the middle
    if args.rank == 0:
        return asyncio.run(lead(args, None))
    with Members() as members:
        args.store = f"tcp://127.0.0.1:{members.store.port}"
        for number in range(1, args.workers + 1):
            members.start(number)
        began = time.monotonic()
        code = asyncio.run(lead(args, members))
        say("%.1f s in all", time.monotonic() - began)
        return max(code, members.wait())
    return 130  # Ctrl-C


if __name__ == "__main__":
    ended(main)
