"""A rollout engine: plays with the newest weights, and sends what happened. Some die at a moment of their own."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

import multiworld as mw
from cartpole.policy import Player, policy
from multiworld import weights

__all__ = ["BUCKET", "CREATION", "HEAD", "TRANSFER", "engine", "play_on"]

BUCKET = 4096
"""Bytes: the policy has five buckets."""
REST = 0.1
"""Seconds of each batch in which the CPU rests, as where a GPU computes. Else a start of an engine takes CPU time from
the others, and they from the trainer."""
HEAD = 6
"""Numbers before each batch: its version, when it began (ns), and the digest of the weights as four."""
CREATION, TRANSFER = "in group creation", "in a transfer"


def engine(store: str, seat: int, moment: str) -> None:
    """Play until the trainer has gone; die at `moment`, if it is one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    if moment == CREATION:
        mw.subscribe(_die_joining)
    net = policy()
    subscriber = weights.Subscriber("policy", net, store, seat=str(seat), timeout=20)
    if moment == TRANSFER:
        threading.Thread(target=_die_receiving, args=(subscriber,), daemon=True).start()
    player = Player(net, seed=os.getpid())
    subscriber.update(60)
    for _ in range(5):
        try:
            world = mw.join(f"rollouts/{seat}", 1, 2, store=store, timeout=20)
        except mw.JoinError:
            continue  # the trainer was about to join with the engine before
        try:
            play_on(world, subscriber, player, net)
        except (mw.BrokenWorldException, TimeoutError):
            break  # the trainer has ended
    subscriber.close()


def play_on(world: mw.World, subscriber: weights.Subscriber, player: Player, net: torch.nn.Module) -> None:
    """Play with the newest weights only, and tell with each batch which they were."""
    while True:
        if not subscriber.ready:
            subscriber.update()
        began, version = time.monotonic_ns(), subscriber.version
        batch = player.play()
        time.sleep(REST)
        head = torch.zeros(HEAD, dtype=torch.int64)
        head[0], head[1] = version or 0, began
        # Of the weights that were played with, not of what was told.
        head[2:] = torch.frombuffer(bytearray.fromhex(weights.digest(net, BUCKET)), dtype=torch.int64)
        world.send(head, 0)
        world.send(batch, 0)


def _die_joining(event: mw.Event) -> None:
    if isinstance(event, mw.WorldJoining):
        threading.Timer(0.004, _die).start()  # a join takes some 10 ms


def _die_receiving(subscriber: weights.Subscriber) -> None:
    while subscriber.told is None:
        time.sleep(0)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
