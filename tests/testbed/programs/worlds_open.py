"""Operations put together in a world that ends before they are posted, or in a block that an exception leaves."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from programs.worldkit import broken, everything, full, joined, meet, same, until

if TYPE_CHECKING:
    from bed.rank import Rank

    import multiworld as mw

LATE = 1.5  # seconds: three times what an abort waits for callers


def opened(me: Rank) -> None:
    """Rank 0 puts operations together; while it does, the other member leaves (but for the user's).

    Then the same thread uses another world: an NCCL group that is left open would swallow its operations.
    """
    assert me.bed is not None
    healthy, world = joined(me, "healthy"), joined(me)
    wrong: list[Any] = []
    for number, case in enumerate(me.config["cases"]):
        if me.rank == 0:
            with broken(me, "broken", case=case):
                CASES[case](me, world, f"inside{number}")
            me.event("after", case=case, depth=me.bed.count("group_depth"), open=len(_pending(world)))
        else:
            meet(me, f"inside{number}")
            if not case.startswith("user"):
                world.close()
        t = full(me.rank + number, me.device)
        healthy.all_reduce(t)
        wrong += [] if same(t, 2 * number + 1) else [["healthy", case, t.cpu().tolist()]]
        if not case.startswith("user"):
            if me.rank == 0:
                world.rejoin()
            else:
                world = joined(me)
        wrong += [[case, *each] for each in everything(world, me.device, ways=("method",))]
    wrong += everything(healthy, me.device, ways=("method",))
    gone = until(lambda: me.bed is None or me.bed.count("comms") <= 2)
    me.event("values", wrong=wrong, gone=gone)
    meet(me, "done")
    world.close()
    healthy.close()


def _pending(world: mw.World) -> list[Any]:
    """What torch still has of operations that were put together in the world's block."""
    if world.state.value != "active":
        return []
    with world:
        return list(dist.distributed_c10d._world.pg_coalesce_state)


def _wait(world: mw.World) -> None:
    assert until(lambda: world.state.value != "active")


def captured(me: Rank, world: mw.World, inside: str) -> None:
    """Torch keeps the operations to itself, until the end."""
    with world, _coalescing_manager(device=me.device, async_ops=True) as together:
        dist.all_reduce(full(1, me.device))
        meet(me, inside)
        _wait(world)
        dist.all_reduce(full(1, me.device))
    together.wait()


def ending(me: Rank, world: mw.World, inside: str) -> None:
    """It is their end that comes too late."""
    with world, _coalescing_manager(device=me.device):
        dist.all_reduce(full(1, me.device))
        meet(me, inside)
        _wait(world)


def outside(me: Rank, world: mw.World, inside: str) -> None:
    """No block: the group is named."""
    group = world.group
    with _coalescing_manager(group, me.device):
        dist.all_reduce(full(1, me.device), group=group)
        meet(me, inside)
        _wait(world)


def queued(me: Rank, world: mw.World, inside: str) -> None:
    """NCCL has some of them."""
    with world, _coalescing_manager(device=me.device, async_ops=True):
        dist.isend(full(1, me.device), 1)
        meet(me, inside)
        _wait(world)
        dist.irecv(full(1, me.device), 1)


def late(me: Rank, world: mw.World, inside: str) -> None:
    """The same, and the thread comes back long after the world has ended: its communicator must be there."""
    with world, _coalescing_manager(device=me.device, async_ops=True):
        dist.isend(full(1, me.device), 1)
        aborts = me.bed.count("aborts") if me.bed else 0
        meet(me, inside)
        _wait(world)
        came = time.monotonic() + LATE
        assert until(lambda: time.monotonic() > came)
        me.event("late", aborts=me.bed.count("aborts") - aborts if me.bed else 0)
        dist.irecv(full(1, me.device), 1)


def user(me: Rank, world: mw.World, inside: str) -> None:
    """The world is well; what leaves its block is the user's own."""
    with contextlib.suppress(ZeroDivisionError), world, _coalescing_manager(device=me.device):
        dist.all_reduce(full(1, me.device))
        raise ZeroDivisionError
    meet(me, inside)


def user_inside(me: Rank, world: mw.World, inside: str) -> None:
    """The same, and it does not leave the block."""
    with world:
        with contextlib.suppress(ZeroDivisionError), _coalescing_manager(device=me.device):
            dist.all_reduce(full(1, me.device))
            raise ZeroDivisionError
        meet(me, inside)


CASES = {
    "captured": captured,
    "ending": ending,
    "outside": outside,
    "queued": queued,
    "late": late,
    "user": user,
    "user_inside": user_inside,
}
