"""The same trainer and engines in one group of torch.distributed, as frameworks have it: the weights are broadcast."""

from __future__ import annotations

import datetime as dt
import signal
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from cartpole.engine import REST
from cartpole.policy import COLUMNS, STEPS, Learner, Player, policy

__all__ = ["engine", "trainer"]


def _join(store: str, rank: int, size: int, timeout: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    seconds = dt.timedelta(seconds=timeout)
    host, port = store.removeprefix("tcp://").split(":")
    met = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=met, rank=rank, world_size=size, timeout=seconds)


def engine(store: str, rank: int, size: int, timeout: float) -> None:
    """Play with the weights that come, and send what happened, until something fails."""
    _join(store, rank, size, timeout)
    net = policy()
    player, values = Player(net, rank), list(net.parameters())
    try:
        while True:
            weights = torch.nn.utils.parameters_to_vector(values).detach()
            dist.broadcast(weights, 0)
            torch.nn.utils.vector_to_parameters(weights, values)
            batch = player.play()
            time.sleep(REST)
            dist.send(batch, 0)
    except RuntimeError:
        print(f"plain torch.distributed: engine {rank} ended, too", flush=True)


def trainer(store: str, size: int, timeout: float, supervisor: Connection) -> None:
    """Learn until something fails, and say how that went; the supervisor is told when each step had ended."""
    _join(store, 0, size, timeout)
    learner, steps, began = Learner(), 0, time.monotonic()
    try:
        while True:
            began = time.monotonic()
            dist.broadcast(torch.nn.utils.parameters_to_vector(learner.net.parameters()).detach(), 0)
            batches = [torch.zeros(STEPS, COLUMNS) for _ in range(1, size)]
            for rank, batch in enumerate(batches, 1):
                dist.recv(batch, rank)
            learner.learn(batches)
            steps += 1
            supervisor.send(time.monotonic())
    except RuntimeError as error:
        after = time.monotonic() - began
        print(
            f"plain torch.distributed: the trainer ended in step {steps}, {after:.1f} s after that had begun: ",
            end="",
        )
        print(str(error).splitlines()[0][:160], flush=True)
