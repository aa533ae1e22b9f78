"""One rank of a gloo group whose collectives have known results.

usage: gloo.py RENDEZVOUS_FILE RANK SIZE
"""

import datetime
import json
import sys

import torch
import torch.distributed as dist

path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
limit = datetime.timedelta(seconds=60)
# Every tensor lives until the groups are gone: in torch 2.6 ~ProcessGroupGloo joins its threads with the GIL held, and
# a thread that drops the last reference to a finished operation's tensor needs the GIL for its Python object.
alive = []


def tensor(values):
    alive.append(torch.tensor(values))
    return alive[-1]


dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=limit)


def checks():
    mine = tensor([rank + 1.0] * 4)
    dist.all_reduce(mine)
    yield "all_reduce", mine.tolist() == [size * (size + 1) / 2] * 4
    told = tensor([7.0 if rank == 0 else 0.0])
    dist.broadcast(told, 0)
    yield "broadcast", told.item() == 7.0
    parts = [tensor([0.0]) for _ in range(size)]
    dist.all_gather(parts, tensor([float(rank)]))
    yield "all_gather", [part.item() for part in parts] == [float(n) for n in range(size)]
    came = tensor([0.0])
    sent = dist.isend(tensor([10.0 + rank]), (rank + 1) % size)
    dist.recv(came, (rank - 1) % size)
    sent.wait()
    yield "send/recv", came.item() == 10.0 + (rank - 1) % size
    second = dist.new_group(list(range(size)), timeout=limit)
    again = tensor([float(rank)])
    dist.all_reduce(again, op=dist.ReduceOp.MAX, group=second)
    yield "a second group", again.item() == size - 1.0
    dist.barrier()
    yield "barrier", True


wrong = [name for name, right in checks() if not right]
dist.destroy_process_group()
print("M8D " + json.dumps({"outcome": f"wrong: {', '.join(wrong)}" if wrong else "right"}))
