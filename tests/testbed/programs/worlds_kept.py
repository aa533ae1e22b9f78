"""Works of a world that is over, kept by a user or by an exception's traceback, and let go of much later.

What is freed is overwritten at once here (glibc's M_PERTURB): a work that touches its dead backend is seen to.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import multiworld as mw
from multiworld._c10d.nccl import backend as nccl
from programs.worldkit import JOIN, everything, full, joined, meet, until

if TYPE_CHECKING:
    from bed.rank import Rank

M_PERTURB = -6


def kept(me: Rank) -> None:
    """Keep something of a world beyond its end, which is a rejoin or a close; tell whether its backend waits for it."""
    assert ctypes.CDLL(None).mallopt(M_PERTURB, 0xAB) == 1
    what, world = me.config["what"], joined(me)
    with world:
        group = dist.distributed_c10d._get_default_group()
        if what == "subgroup":
            group = dist.new_group([0, 1])
    backend = weakref.ref(group._get_backend(me.device))
    needed = nccl.needed_by_works(group, me.device) is not None
    held = [KEEP[what](me, world, weakref.ref(group))]  # a frame that is kept must not keep the group
    del group
    if what != "exception":  # which comes when the other member goes
        meet(me, "held")
    wrong: list[Any] = []
    if me.config["end"] == "rejoin":
        if me.rank == 0:
            assert until(lambda: world.state.value == "broken")
            world.rejoin(timeout=JOIN)
        else:
            world.close()
            world = joined(me)
        wrong = everything(world, me.device, ways=("method",))
        meet(me, "used")
    else:
        world.close()
    gc.collect()
    me.event("over", alive=backend() is not None, needed=needed, wrong=wrong, kept=held != [None])
    let_go(held)
    gc.collect()
    world.close()
    me.event("gone", gone=until(lambda: gc.collect() >= 0 and backend() is None))
    meet(me, "done")


def let_go(held: list[Any]) -> None:
    """Let go of what is held; a functional operation is let go of by waiting for it."""
    thing = held.pop()
    if isinstance(thing, torch.Tensor):
        with contextlib.suppress(RuntimeError, mw.MultiworldError):  # its world is over
            functional.wait_tensor(thing)


def exception(me: Rank, world: mw.World, _group: Any) -> Any:
    """The exception of an operation that the other member never joins; its traceback has the work in its frames."""
    work = world.irecv(full(-7, me.device), 1) if me.rank == 0 else None
    meet(me, "held")
    if work is None:
        return None
    try:
        work.wait()
    except mw.BrokenWorldException as exc:
        return exc
    raise AssertionError("nobody sent")


def finished(me: Rank, world: mw.World, _group: Any) -> Any:
    """The work of an operation that has ended."""
    work = world.all_reduce(full(1, me.device), async_op=True)
    work.wait()
    return work


def pending(me: Rank, world: mw.World, _group: Any) -> Any:
    """The work of an operation that never ends."""
    return world.all_reduce(full(1, me.device), async_op=True) if me.rank == 0 else None


def subgroup(me: Rank, world: mw.World, group: Any) -> Any:
    """The work of an operation of a group inside the world."""
    with world:
        work = dist.all_reduce(full(1, me.device), group=group(), async_op=True)
        assert work is not None
        work.wait()
    return work


def batch(me: Rank, world: mw.World, _group: Any) -> Any:
    """The works of operations that were put together."""
    out, into, other = full(1, me.device), full(-7, me.device), 1 - me.rank
    with world:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, into, other)]
        )
        for work in works:
            work.wait()
    return works


def unwaited(me: Rank, world: mw.World, group: Any) -> Any:
    """The tensor of a functional operation, which nobody has waited for."""
    with world:
        return torch.ops._c10d_functional.all_reduce(full(1, me.device), "sum", group().group_name)


KEEP = {
    "exception": exception,
    "finished": finished,
    "pending": pending,
    "subgroup": subgroup,
    "batch": batch,
    "functional": unwaited,
}
