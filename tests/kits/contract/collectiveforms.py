"""Every collective of a world in every form, under one signature: ``way(world, tensors..., async_op)``."""

from __future__ import annotations

import asyncio

import torch
import torch.distributed as dist

OPS = ("broadcast", "reduce", "gather", "scatter", "all_reduce", "all_gather", "all_gather_into_tensor",
       "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier")  # fmt: skip

NEWER = {"reduce_scatter", "all_to_all"}
GLOO_OPS = OPS
"""Those of gloo: 2.4.0 has not all, 2.13 has."""
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    GLOO_OPS = tuple(op for op in OPS if op not in NEWER)


def counted(count, dtype, rank, start=0):
    """A tensor whose values are small whole numbers, so that sums are exact in every dtype."""
    return ((torch.arange(count) + rank + start) % 7).to(dtype)


def call(op, rank, size, count, dtype, root):
    """The arguments of a collective on one member, and a function that says what is wrong afterwards."""
    mine = counted(count, dtype, rank)
    everyone = [counted(count, dtype, each) for each in range(size)]
    total = sum(each.double() for each in everyone).to(dtype)
    parts = [[counted(count, dtype, a, 10 * b) for b in range(size)] for a in range(size)]  # from a to b
    own_total = sum(parts[a][rank].double() for a in range(size)).to(dtype)
    room = [torch.zeros(count, dtype=dtype) for _ in range(size)]
    out = torch.zeros(count, dtype=dtype)
    whole = torch.zeros(size * count, dtype=dtype)
    at_root = rank == root
    return {
        "broadcast": lambda: ((mine, root), lambda: same(mine, everyone[root])),
        "reduce": lambda: ((mine, root), lambda: not at_root or same(mine, total)),
        "gather": lambda: (
            (mine, room if at_root else None, root),
            lambda: not at_root or all(map(same, room, everyone)),
        ),
        "scatter": lambda: (
            (out, parts[root] if at_root else None, root),
            lambda: same(out, parts[root][rank]),
        ),
        "all_reduce": lambda: ((mine,), lambda: same(mine, total)),
        "all_gather": lambda: ((room, mine), lambda: all(map(same, room, everyone))),
        "all_gather_into_tensor": lambda: ((whole, mine), lambda: same(whole, torch.cat(everyone))),
        "reduce_scatter": lambda: ((out, parts[rank]), lambda: same(out, own_total)),
        "reduce_scatter_tensor": lambda: ((out, torch.cat(parts[rank])), lambda: same(out, own_total)),
        "all_to_all": lambda: (
            (room, parts[rank]),
            lambda: all(same(room[a], parts[a][rank]) for a in range(size)),
        ),
        "all_to_all_single": lambda: (
            (whole, torch.cat(parts[rank])),
            lambda: same(whole, torch.cat([parts[a][rank] for a in range(size)])),
        ),
        "barrier": lambda: ((), lambda: True),
    }[op]()


def same(found, wanted):
    return torch.equal(found, wanted)


def method(w, op, args):
    getattr(w, op)(*args)


def method_work(w, op, args):
    getattr(w, op)(*args, async_op=True).wait()


def block(w, op, args):
    with w:
        _dist(op)(*args)


def block_work(w, op, args):
    with w:
        work = _dist(op)(*args, async_op=True)
    work.wait()


def awaited(w, op, args):
    asyncio.run(_awaited(w, op, args))


async def _awaited(w, op, args):
    await getattr(w.aio, op)(*args)


def _dist(op):
    return getattr(dist, op)


WAYS = {each.__name__: each for each in (method, method_work, block, block_work, awaited)}
