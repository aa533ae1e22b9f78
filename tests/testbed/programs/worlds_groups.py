"""Groups inside NCCL worlds: made by members that have made different ones before, with timeouts of their own; works."""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from programs.worldkit import broken, full, joined, meet, same

if TYPE_CHECKING:
    from bed.rank import Rank


def meshes(me: Rank) -> None:
    """Four members, two of which have a group that the others have not, make a mesh of two dimensions."""
    world = joined(me)
    wrong: list[Any] = []
    with world:
        dist.new_group([0, 1])
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "columns"))
        for name, total in (("rows", 2 * (me.rank % 2) + 2), ("columns", 4 * (me.rank // 2) + 1)):
            t = full(me.rank, me.device)
            dist.all_reduce(t, group=mesh.get_group(name))
            wrong += [] if same(t, total) else [[name, t.cpu().tolist()]]
        dist.barrier()
    me.event("values", wrong=wrong)
    meet(me, "done")
    world.close()


def splits(me: Rank) -> None:
    """The same members split again and again what they have destroyed; the first of them comes late."""
    world = joined(me)
    wrong: list[Any] = []
    with world:
        for number in range(6):
            if me.rank == 0:
                time.sleep(0.1)  # the others ask first under which address it connects
            made = dist.split_group(split_ranks=[[0, 1], [2]][: 1 + number % 2])
            if me.rank < 2 or number % 2:
                t = full(me.rank + 1, me.device)
                dist.all_reduce(t, group=made)
                wrong += [] if same(t, 3) else [[number, t.cpu().tolist()]]
                dist.destroy_process_group(made)
            elif made is not dist.GroupMember.NON_GROUP_MEMBER and made is not None:
                wrong.append([number, "a group without this member", str(made)])
        dist.barrier()
    me.event("values", wrong=wrong)
    meet(me, "done")
    world.close()


def futures(me: Rank) -> None:
    """The futures of what is coalesced: a send, a receive, a batch of both."""
    world, peer = joined(me), 1 - me.rank
    wrong: list[Any] = []
    with world:
        t = full(me.rank + 1, me.device)
        work = dist.isend(t, peer) if me.rank == 0 else dist.irecv(t, peer)
        (value,) = work.get_future().wait()
        wrong += [] if same(value, 1) else [["point to point", value.cpu().tolist()]]
        into = full(-7, me.device)
        ops = [dist.P2POp(dist.isend, full(me.rank, me.device), peer), dist.P2POp(dist.irecv, into, peer)]
        for each in dist.batch_isend_irecv(ops):
            said = each.get_future().wait()
            wrong += [] if said == [] else [["batch", str(said)]]
        wrong += [] if same(into, peer) else [["batch", into.cpu().tolist()]]
    me.event("values", wrong=wrong)
    meet(me, "done")
    world.close()


def refused(me: Rank) -> None:
    """Torch refuses an operation before NCCL sees it; then torch's own group is made and used in the same thread."""
    world = joined(me)
    with world:
        for _ in range(2):
            odd = [torch.ones(4, dtype=torch.int16).to(me.device) for _ in range(2)]
            me.attempt(
                "refused", lambda odd=odd: dist.all_to_all([torch.zeros_like(e) for e in odd], odd) and None
            )
        state = world.state.value
    t = full(me.rank + 1, me.device)
    me.init(me.config["backend"])
    dist.all_reduce(t)
    torch.cuda.synchronize()
    me.event("values", wrong=[] if same(t, 3) else [t.cpu().tolist()], state=state)
    meet(me, "done")
    dist.destroy_process_group()
    world.close()


def limits(me: Rank) -> None:
    """Operations of groups with timeouts of their own: shorter than the world's, and longer."""
    patient, hasty = joined(me, "patient", timeout=2), joined(me, "hasty", timeout=60)
    with patient:
        group = dist.new_group(timeout=dt.timedelta(seconds=40))
        if me.rank == 1:
            time.sleep(5)
        t = full(me.rank + 1, me.device)
        dist.all_reduce(t, group=group)
    me.event("waited", wrong=[] if same(t, 3) else [t.cpu().tolist()], state=patient.state.value)
    with hasty:
        group = dist.new_group(timeout=dt.timedelta(seconds=2))
        if me.rank == 0:
            with broken(me, "broken"):
                dist.all_reduce(t, group=group)
    meet(me, "done")
    patient.close()
    hasty.close()


def gives_up(me: Rank) -> None:
    """NCCL's abort hangs for longer than torch waits for it: the world is not free, and says so, until it has ended."""
    world = joined(me)
    first, second = full(-7, me.device), full(-7, me.device)
    if me.rank == 1:
        me.hear("never", timeout=600)
    works = [world.irecv(first, 1), world.irecv(second, 1)]
    me.event("pending")
    with broken(me, "first"):
        works[0].wait()
    time.sleep(me.config["later"])
    with broken(me, "second"):
        works[1].wait()
    me.event("closed", freed=world.close(timeout=1))
    me.bed.set("ABORT_HANG_MS", 0)
    me.event("later", freed=world.close(timeout=60))
