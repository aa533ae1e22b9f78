"""What the programs of the matrix are made of: steps that are told, groups, and every operation as a pending one."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank

__all__ = ["OPS", "Party", "Pending", "default_world", "leave", "other_world", "stay", "step"]

# How a process ends is the observation. Printing the stacks of running threads while it aborts can end it by SIGSEGV.
faulthandler.disable()

UNTOUCHED = -7.0
MUCH = 1 << 24
"""Elements that no transport takes in before the receiver is there: a small send is over at once."""

FOREVER = 600.0
N = 4


def step(rank: Rank, name: str, run: Callable[[], Any]) -> bool:
    """Take a step and tell how it went; the result is told too, where it is a plain value."""
    rank.event("begin", step=name)
    try:
        result = run()
    except Exception as exc:  # noqa: BLE001 -- whatever it is, is the observation
        rank.event("end", step=name, ok=False, type=type(exc).__name__, text=str(exc))
        return False
    plain = result if isinstance(result, (str, int, float, bool)) else None
    rank.event("end", step=name, ok=True, result=plain)
    return True


def leave(rank: Rank) -> None:
    """Say that the observation is complete, and go without destructors: those are a scenario of their own."""
    rank.event("done")
    os._exit(0)


def stay(rank: Rank) -> None:
    """Be there, do nothing, until the test ends this process."""
    rank.event("ready")
    time.sleep(FOREVER)


@dataclass(frozen=True)
class Party:
    """One process's part in a group."""

    group: Any
    rank: int
    size: int
    device: torch.device
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def peer(self) -> int:
        """The next member."""
        return (self.rank + 1) % self.size

    def filled(self, value: float, count: int = N) -> torch.Tensor:
        """Make a tensor on the device without a kernel."""
        return torch.full((count,), float(value)).to(self.device)

    def out(self, count: int = N) -> torch.Tensor:
        """Make an output whose content says that nothing arrived."""
        return self.filled(UNTOUCHED, count)

    def of_peer(self, out: torch.Tensor) -> torch.Tensor:
        """Return the part of an output that comes from the next member: one's own part needs nobody."""
        size = out.numel() // self.size
        return out[self.peer * size : (self.peer + 1) * size]

    def healthy(self) -> str:
        """Sum over the members and look at the sum: "right", or what it was instead."""
        tensor = self.filled(self.rank + 1)
        with self.lock:  # two threads in one communicator at a time is more than NCCL allows
            work = self.group.allreduce([tensor])
        work.wait()
        value = tensor.cpu()[0].item()
        return "right" if value == self.size * (self.size + 1) / 2 else f"wrong: {value:g}"


@dataclass
class Pending:
    """An operation under way.

    Attributes:
        works: what it returned, in order.
        tensor: where its result will be; None where there is none.
        before: what is in there as long as nothing came.
    """

    works: list[Any]
    tensor: torch.Tensor | None = None
    before: float = UNTOUCHED
    kept: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def read(self) -> str:
        """Look at the result: "stale" is what was there before."""
        if self.tensor is None:
            torch.cuda.current_stream().synchronize()
            return "none"
        return "stale" if bool((self.tensor.cpu() == self.before).all()) else "new"


def _device(place: int) -> torch.device:
    """Set and return the device of a place in a group: torch 2.15 takes the same one by itself, and no other."""
    found = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


def default_world(
    rank: Rank, name: str, place: int, size: int, *, backend: str, timeout: float = 600.0
) -> Party:
    """Make the default group, behind a prefix of its own in the store."""
    device = _device(place)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, rank.store()),
        rank=place,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    return Party(dist.group.WORLD, place, size, device)


def other_world(
    rank: Rank, name: str, place: int, size: int, *, backend: str, timeout: float = 600.0
) -> Party:
    """Make a group that is nobody's sub-group, beside a default group or without one.

    Its operations are called on the group itself: torch.distributed's functions want a default group.
    """
    device = _device(place)
    # Unseen by this one: torch 2.15 would split the default group, which is another world.
    default, c10d._world.default_pg = c10d._world.default_pg, None
    try:
        made = c10d._new_process_group_helper(
            size,
            place,
            [],
            c10d.Backend(backend),
            dist.PrefixStore(name, rank.store()),
            group_name=name,
            timeout=timedelta(seconds=timeout),
        )
    finally:
        c10d._world.default_pg = default
    return Party(made[0] if isinstance(made, tuple) else made, place, size, device)


def _sum(p: Party) -> Pending:
    tensor = p.filled(p.rank + 1)
    return Pending([dist.all_reduce(tensor, async_op=True)], tensor, p.rank + 1)


def _broadcast(p: Party) -> Pending:
    tensor = p.out() if p.rank == 0 else p.filled(p.rank)
    return Pending([dist.broadcast(tensor, src=1, async_op=True)], tensor)


def _reduce(p: Party) -> Pending:
    tensor = p.filled(p.rank + 1)
    return Pending([dist.reduce(tensor, dst=0, async_op=True)], tensor, p.rank + 1)


def _all_gather(p: Party) -> Pending:
    outs = [p.out() for _ in range(p.size)]
    work = dist.all_gather(outs, p.filled(p.rank), async_op=True)
    return Pending([work], outs[p.peer], kept=outs)


def _all_gather_uneven(p: Party) -> Pending:
    outs = [p.out(N + each) for each in range(p.size)]
    work = dist.all_gather(outs, p.filled(p.rank, N + p.rank), async_op=True)
    return Pending([work], outs[p.peer], kept=outs)


def _all_gather_tensor(p: Party) -> Pending:
    out = p.out(N * p.size)
    return Pending([dist.all_gather_into_tensor(out, p.filled(p.rank), async_op=True)], p.of_peer(out))


def _reduce_scatter(p: Party) -> Pending:
    out = p.out()
    return Pending([dist.reduce_scatter_tensor(out, p.filled(1, N * p.size), async_op=True)], out)


def _send(p: Party) -> Pending:
    """Rank 0 sends to rank 1, so that the other one of the pair is this program's victim."""
    tensor = p.filled(p.rank + 1, MUCH)
    call = dist.isend if p.rank == 0 else dist.irecv
    return Pending([call(tensor, p.peer)], None, kept=[tensor])


def _recv(p: Party) -> Pending:
    tensor = p.out() if p.rank == 0 else p.filled(p.rank)
    call = dist.irecv if p.rank == 0 else dist.isend
    return Pending([call(tensor, p.peer)], tensor if p.rank == 0 else None, kept=[tensor])


def _batch(p: Party) -> Pending:
    out, given = p.out(), p.filled(p.rank)
    wanted = [dist.P2POp(dist.isend, given, p.peer), dist.P2POp(dist.irecv, out, (p.rank - 1) % p.size)]
    return Pending(dist.batch_isend_irecv(wanted), out, kept=[given])


def _gather(p: Party) -> Pending:
    outs = [p.out() for _ in range(p.size)] if p.rank == 0 else None
    work = dist.gather(p.filled(p.rank), outs, dst=0, async_op=True)
    return Pending([work], outs[p.peer] if outs else None)


def _scatter(p: Party) -> Pending:
    given = [p.filled(each) for each in range(p.size)] if p.rank == 0 else None
    out = p.out()
    return Pending([dist.scatter(out, given, src=0, async_op=True)], out, kept=[given])


def _all_to_all(p: Party) -> Pending:
    outs, given = [p.out() for _ in range(p.size)], [p.filled(p.rank) for _ in range(p.size)]
    return Pending([dist.all_to_all(outs, given, async_op=True)], outs[p.peer], kept=[outs, given])


def _all_to_all_single(p: Party) -> Pending:
    out = p.out(N * p.size)
    return Pending([dist.all_to_all_single(out, p.filled(p.rank, N * p.size), async_op=True)], p.of_peer(out))


def _all_to_all_uneven(p: Party) -> Pending:
    sizes = [each + 1 for each in range(p.size)]
    theirs = [p.rank + 1] * p.size
    out, given = p.out(sum(theirs)), p.filled(p.rank, sum(sizes))
    return Pending([dist.all_to_all_single(out, given, theirs, sizes, async_op=True)], p.of_peer(out))


def _coalesced_call(p: Party) -> Pending:
    tensors = [p.filled(p.rank + 1) for _ in range(2)]
    return Pending([p.group.allreduce_coalesced(tensors)], tensors[0], p.rank + 1, kept=tensors)


def _managed(p: Party, call: Callable[[], Any], tensor: torch.Tensor, before: float) -> Pending:
    with c10d._coalescing_manager(device=p.device, async_ops=True) as manager:
        call()
        call()
    return Pending([manager], tensor, before)


def _managed_sum(p: Party) -> Pending:
    tensor = p.filled(p.rank + 1)
    return _managed(p, lambda: dist.all_reduce(tensor), tensor, p.rank + 1)


def _managed_gather(p: Party) -> Pending:
    out, given = p.out(N * p.size), p.filled(p.rank)
    return _managed(p, lambda: dist.all_gather_into_tensor(out, given), p.of_peer(out), UNTOUCHED)


def _managed_scatter(p: Party) -> Pending:
    out, given = p.out(), p.filled(1, N * p.size)
    return _managed(p, lambda: dist.reduce_scatter_tensor(out, given), out, UNTOUCHED)


def _barrier(p: Party) -> Pending:
    return Pending([dist.barrier(async_op=True)])


OPS: dict[str, Callable[[Party], Pending]] = {
    "all_reduce": _sum,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_uneven": _all_gather_uneven,
    "all_gather_into_tensor": _all_gather_tensor,
    "reduce_scatter_tensor": _reduce_scatter,
    "send": _send,
    "recv": _recv,
    "batch": _batch,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_uneven": _all_to_all_uneven,
    "all_reduce_coalesced": _coalesced_call,
    "managed_all_reduce": _managed_sum,
    "managed_all_gather": _managed_gather,
    "managed_reduce_scatter": _managed_scatter,
    "barrier": _barrier,
}
"""Every kind of operation torch has, on the default group, started and not waited for."""
