"""Operations put together in a world that ends before they are posted, or in a block that an exception leaves."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import multiworld as mw
from programs.worldkit import broken, everything, full, joined, meet, same, until

if TYPE_CHECKING:
    from bed.rank import Rank

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
            if case in {"user_inside", "user_nothing", "user_elastic", "user_wrong", "user_outside"}:
                world.all_reduce(full(1, me.device))
            if not case.startswith("user"):
                world.close()
        t = full(me.rank + number, me.device)
        healthy.all_reduce(t)
        wrong += [] if same(t, 2 * number + 1) else [["healthy", case, t.cpu().tolist()]]
        if not case.startswith("user"):
            if me.rank == 0 and case != "closed":
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
    """What torch still has of operations that were put together in the world's block, and outside of it."""
    found = list(dist.distributed_c10d._world.pg_coalesce_state)  # outside of it
    if world.state.value == "active":
        with world:
            found += dist.distributed_c10d._world.pg_coalesce_state
    return found


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


def outside_late(me: Rank, world: mw.World, inside: str) -> None:
    """The same, and the end comes long after the world has been released."""
    group = world.group
    with _coalescing_manager(group, me.device, async_ops=True):
        dist.isend(full(1, me.device), 1, group=group)
        meet(me, inside)
        _wait(world)
        came = time.monotonic() + 2 * LATE
        assert until(lambda: time.monotonic() > came)


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
        _goes_on(me, world, inside)


def user_elastic(me: Rank, world: mw.World, inside: str) -> None:
    """The same, by the group that stands for the present generation's."""
    with world:
        group = world.elastic_group
        with contextlib.suppress(ZeroDivisionError), _coalescing_manager(group, me.device):
            raise ZeroDivisionError
        _goes_on(me, world, inside)


def user_nothing(me: Rank, world: mw.World, inside: str) -> None:
    """The same, and nothing was put together yet."""
    with world:
        with contextlib.suppress(ZeroDivisionError), _coalescing_manager(device=me.device):
            raise ZeroDivisionError
        _goes_on(me, world, inside)


def _goes_on(me: Rank, world: mw.World, inside: str) -> None:
    """The block's next collective is one, and is not put to the rest of the one before."""
    meet(me, inside)
    t = full(1, me.device)
    dist.all_reduce(t)
    assert same(t, 2), t


def user_batch(me: Rank, world: mw.World, inside: str) -> None:
    """An operation of a batch cannot be posted; nothing is wrong with the world, and no block of it is there."""
    bad = torch.ones(4, dtype=torch.int16).to(me.device)
    with world:
        ops = [dist.P2POp(dist.irecv, bad, 1)]
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        world.batch_isend_irecv(ops)
        me.event("taken")
    meet(me, inside)


def user_wrong(me: Rank, world: mw.World, inside: str) -> None:
    """The same, in a block that goes on, and by an error that comes before torch's."""
    with world:
        ops = [dist.P2POp(dist.irecv, torch.ones(4, dtype=torch.int16).to(me.device), 1)]
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            dist.batch_isend_irecv(ops)
            me.event("taken")
        t = full(1, me.device)
        work = dist.all_reduce(t, async_op=True)
        meet(me, inside)
        assert work is not None
        work.wait()
        assert same(t, 2)


def user_outside(me: Rank, world: mw.World, inside: str) -> None:
    """The same outside of all blocks, where torch keeps what is put together in a place of its own."""
    ops = [dist.P2POp(dist.irecv, torch.ones(4, dtype=torch.int16).to(me.device), 1, world.group)]
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        dist.batch_isend_irecv(ops)
        me.event("taken")
    t = full(1, me.device)
    work = dist.all_reduce(t, async_op=True, group=world.group)
    meet(me, inside)
    assert work is not None
    work.wait()
    assert same(t, 2)


def half(me: Rank, world: mw.World, inside: str) -> None:
    """NCCL has one of them when the user's error comes: to close the group sends it, and the world is out of step."""
    with world:
        with contextlib.suppress(ZeroDivisionError), _coalescing_manager(device=me.device):
            dist.isend(full(1, me.device), 1)
            raise ZeroDivisionError
        _cut_off(me, world, inside)


def half_batch(me: Rank, world: mw.World, inside: str) -> None:
    """The same, and the second operation of a batch cannot be posted."""
    bad = torch.ones(4, dtype=torch.int16).to(me.device)
    _half_batch(me, world, inside, bad, (TypeError, ValueError, RuntimeError))


def half_on_cpu(me: Rank, world: mw.World, inside: str) -> None:
    """The same; torch would let gloo carry it, and lose its work."""
    _half_batch(me, world, inside, torch.ones(4), mw.WrongDeviceError)


def _half_batch(me: Rank, world: mw.World, inside: str, bad: torch.Tensor, error: Any) -> None:
    with world:
        ops = [dist.P2POp(dist.isend, full(1, me.device), 1), dist.P2POp(dist.irecv, bad, 1)]
        with contextlib.suppress(error):
            dist.batch_isend_irecv(ops)
            me.event("taken")
        _cut_off(me, world, inside)


def _cut_off(me: Rank, world: mw.World, inside: str) -> None:
    if world.state is not mw.State.BROKEN:
        me.event("taken")
    meet(me, inside)
    dist.all_reduce(full(1, me.device))


def closed(me: Rank, world: mw.World, inside: str) -> None:
    """The thread that has it open closes the world, which waits for no operation's time."""
    with contextlib.suppress(mw.BrokenWorldException, mw.WorldClosedError), world:
        world.group._start_coalescing(me.device)
        dist.isend(full(1, me.device), 1)
        began = time.monotonic()
        world.close()
        me.event("closing", ms=(time.monotonic() - began) * 1000)
    meet(me, inside)


def beside(me: Rank) -> None:
    """An operation of another world where this thread puts operations together: it would be begun with those."""
    healthy, world = joined(me, "healthy"), joined(me)
    # Kept: torch lets go of what is sent before the operation is begun.
    sent, got, peer = full(me.rank + 1, me.device), full(0, me.device), 1 - me.rank
    with world:
        with _coalescing_manager(device=me.device, async_ops=True) as together:
            dist.isend(sent, peer)
            told = ""
            try:
                healthy.all_reduce(full(1, me.device))
            except RuntimeError as error:
                told = str(error)
            for _ in range(2):  # the first one leaves nothing that torch refuses the second one for
                with contextlib.suppress(RuntimeError):
                    _exchange(healthy, peer, me.device)
            dist.irecv(got, peer)
        together.wait()
    t = full(1, me.device)
    healthy.all_reduce(t)
    _exchange(healthy, peer, me.device)
    me.event("told", text=told, right=same(got, peer + 1) and same(t, 2))
    meet(me, "done")
    world.close()
    healthy.close()


def _exchange(world: mw.World, peer: int, device: Any) -> None:
    with world:
        ops = [dist.P2POp(dist.isend, full(3, device), peer), dist.P2POp(dist.irecv, full(0, device), peer)]
    for work in world.batch_isend_irecv(ops):
        work.wait()
    assert same(ops[1].tensor, 3)


CASES = {
    "captured": captured,
    "ending": ending,
    "outside": outside,
    "outside_late": outside_late,
    "queued": queued,
    "late": late,
    "user": user,
    "user_inside": user_inside,
    "user_nothing": user_nothing,
    "user_elastic": user_elastic,
    "user_batch": user_batch,
    "user_wrong": user_wrong,
    "user_outside": user_outside,
    "half": half,
    "half_batch": half_batch,
    "half_on_cpu": half_on_cpu,
    "closed": closed,
}
