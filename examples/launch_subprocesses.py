"""A script that starts its own processes: a small model trained data-parallel and model-parallel at once.

    python examples/launch_subprocesses.py                          four processes: 2 replicas of 2 parts
    python examples/launch_subprocesses.py --world mine             the same in a world of multiworld's
    python examples/launch_subprocesses.py --processes 8 --model 4
    torchrun --nproc-per-node 4 examples/launch_subprocesses.py     already started: runs in place

Each layer's columns are divided over the model-parallel ranks, each batch over the data-parallel ones; all_to_all
turns a division by rows into one by columns and back, and carries the gradients.
"""

from __future__ import annotations

import _ctrl_c  # first: Ctrl-C is quiet from here on

import argparse
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multiworld.launch import (
    LaunchError,
    MultiprocessConfig,
    all_to_all,
    init_and_run,
    init_parallelism,
    launch_subprocesses,
)

WIDTH, ROWS, CLASSES = 32, 64, 4


def to_columns(rows: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """From my rows with all columns to all rows with my columns."""
    pieces = torch.cat(rows.chunk(parts, dim=1))
    return all_to_all(pieces, group=group)


def to_rows(columns: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """The way back."""
    return torch.cat(all_to_all(columns, group=group).chunk(parts), dim=1)


def train(cfg: MultiprocessConfig, steps: int) -> tuple[float, float, float]:
    """Train; return the first and the last loss, and a checksum of what all replicas must agree on."""
    torch.set_num_threads(1)
    parallel = init_parallelism(cfg)
    data, model = parallel.data, parallel.model
    torch.manual_seed(model.rank)  # the parts of the model differ, its replicas do not
    part = nn.Linear(WIDTH, WIDTH // model.size).double()
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, CLASSES).double()
    weights = [*part.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.2)

    everything = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=everything)
    labels = inputs[:, :CLASSES].argmax(dim=1)
    mine = slice(data.rank, None, data.size)  # my replica's share of the batch ...
    own = slice(model.rank, None, model.size)  # ... and, where rows are divided, my part of that
    x, y = inputs[mine], labels[mine][own]

    losses = []
    for step in range(steps):
        order = torch.cat([part(x)[each :: model.size] for each in range(model.size)])  # rank by rank
        rows = to_rows(order, model.group, model.size)
        loss = nn.functional.cross_entropy(head(rows.relu()), y)
        optimizer.zero_grad()
        loss.backward()
        for weight in weights:
            assert weight.grad is not None  # noqa: S101  (all take part)
            if weight.shape[0] == CLASSES:  # the head is everyone's
                dist.all_reduce(weight.grad, group=model.group)
            dist.all_reduce(weight.grad, group=data.group)
            weight.grad /= model.size * data.size
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    back = to_columns(rows.detach(), model.group, model.size)
    assert torch.equal(back, order.detach())  # noqa: S101  (there and back)
    return losses[0], losses[-1], head.weight.detach().sum().item()


def main() -> int:
    """Read the command line, launch, and compare what came back."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes", type=int, default=4, help="default 4; torchrun's number under torchrun"
    )
    parser.add_argument("--model", type=int, default=2, help="parts of the model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--world", help="a world of this name instead of torch's default group")
    parser.add_argument("--launch-method", default="spawn", choices=["spawn", "forkserver"])
    args = parser.parse_args()
    cfg = MultiprocessConfig(
        world_size=None if "RANK" in os.environ else args.processes,  # torchrun says how many it started
        model_parallelism=args.model, backend="gloo", launch_method=args.launch_method,
    )  # fmt: skip
    _ctrl_c.raises()
    print("all processes start" if "RANK" not in os.environ else "already started: runs in place", flush=True)
    try:
        results = launch_subprocesses(
            partial(init_and_run, train, world=args.world), cfg, None, 0, args.steps
        )
    except KeyboardInterrupt:
        return 130
    except LaunchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    (first, last, checksum) = results[0]
    same = all(abs(each[2] - checksum) < 1e-9 for each in results)
    print(f"{len(results)} here: loss {first:.3f} to {last:.3f}, all agree: {same}")
    return 0 if same and last < first else 1


if __name__ == "__main__":
    sys.exit(main())
