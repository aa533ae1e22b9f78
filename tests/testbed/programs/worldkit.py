"""What the programs of worlds share: joining, and every operation in every way, with values."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import multiworld as mw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bed.rank import Rank

WAYS = ("method", "async", "aio", "bare", "bare_async")
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
COUNT = 6  # elements
JOIN = 60.0  # seconds; a join takes some hundredths of one
MEETING = 120.0
PACE = 0.01
"""Seconds between rounds of worlds that go on beside: without a pause they take all of a machine's processors."""


def address(me: Rank) -> str:
    """The store of the test, in a process of its own."""
    return f"tcp://127.0.0.1:{me.store_ports[0]}"


def joined(me: Rank, name: str = "w", **more: Any) -> mw.World:
    """Join a world of all ranks as configured."""
    assert me.meeting_point is not None  # made with the first world, before any thread
    more.setdefault("rank", me.rank)
    more.setdefault("world_size", me.world_size)
    more.setdefault("backend", me.config.get("backend", "nccl"))
    more.setdefault("device", str(me.device) if more["backend"] != "gloo" else None)
    more.setdefault("timeout", me.config.get("timeout", JOIN))
    more.setdefault("hang_timeout", me.config.get("hang_timeout", 5))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # what is guarded is told once; test_worlds_shim looks at it
        return mw.join(name, store=address(me), **more)


def meet(me: Rank, name: str, size: int | None = None) -> None:
    """Wait until so many ranks (default: all) are here.

    Whoever closes its world while another is still on its way out of the last operation breaks it for that one.

    Raises:
        TimeoutError: they did not come.
    """
    store, deadline = me.meeting_point, time.monotonic() + MEETING
    store.add(f"meet/{name}", 1)
    while store.add(f"meet/{name}", 0) < (size or me.world_size):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to {name!r}")
        time.sleep(0.005)


def until(done: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait for something; False when it did not come."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def full(value: float, device: Any, count: int = COUNT) -> torch.Tensor:
    """A tensor on the device, filled on the host: the double runs no kernels."""
    return torch.full((count,), float(value)).to(device)


def same(tensor: torch.Tensor, values: Any) -> bool:
    """Whether the tensor holds one value, or those."""
    there = tensor.cpu().tolist()
    return there == (
        [float(values)] * len(there) if isinstance(values, (int, float)) else [float(v) for v in values]
    )


class Call:
    """One collective: its arguments on this rank, and what it must give."""

    def __init__(self, name: str, rank: int, size: int, device: Any, base: float = 1.0) -> None:
        self.name = name
        mine, n = rank + base, size
        total = sum(r + base for r in range(n))
        t = full(mine, device)
        out = full(-7, device)
        outs = [full(-7, device) for _ in range(n)]
        ins = [full(10 * mine + r, device) for r in range(n)]
        flat = torch.cat([torch.full((COUNT,), float(10 * mine + r)) for r in range(n)]).to(device)
        wide = full(-7, device, COUNT * n)
        row = [10 * (r + base) + rank for r in range(n)]
        self.kwargs: dict[str, Any] = {}
        if name == "all_reduce":
            self.args, self.wanted = (t,), [(t, total)]
        elif name == "broadcast":
            self.args, self.wanted = (t, n - 1), [(t, n - 1 + base)]
        elif name == "reduce":
            self.args, self.wanted = (t, 0), [(t, total)] if rank == 0 else []
        elif name == "all_gather":
            self.args, self.wanted = (outs, t), [(each, r + base) for r, each in enumerate(outs)]
        elif name == "all_gather_into_tensor":
            self.args, self.wanted = (wide, t), [(wide, [r + base for r in range(n) for _ in range(COUNT)])]
        elif name == "gather":
            self.args = (t, outs if rank == 0 else None, 0)
            self.wanted = [(each, r + base) for r, each in enumerate(outs)] if rank == 0 else []
        elif name == "scatter":
            self.args = (out, ins if rank == 0 else None, 0)
            self.wanted = [(out, 10 * base + rank)]
        elif name == "reduce_scatter":
            self.args, self.wanted = (out, ins), [(out, sum(row))]
        elif name == "reduce_scatter_tensor":
            self.args, self.wanted = (out, flat), [(out, sum(row))]
        elif name == "all_to_all":
            self.args, self.wanted = (outs, ins), list(zip(outs, row, strict=True))
        elif name == "all_to_all_single":
            self.args, self.wanted = (wide, flat), [(wide, [v for v in row for _ in range(COUNT)])]
        else:
            self.args, self.wanted = (), []

    def wrong(self) -> list[Any]:
        """What is not as it must be."""
        return [
            [self.name, tensor.cpu().tolist(), values]
            for tensor, values in self.wanted
            if not same(tensor, values)
        ]


def _bare(name: str) -> Callable[..., Any]:
    return getattr(dist, RENAMED.get(name, name), None) or getattr(dist, name)


def run(world: mw.World, way: str, name: str, args: tuple[Any, ...]) -> None:
    """Run one operation in one way, to its end."""
    if way == "method":
        getattr(world, name)(*args)
    elif way == "async":
        getattr(world, name)(*args, async_op=True).wait()
    elif way == "aio":
        asyncio.run(_awaited(getattr(world.aio, name), args))
    else:
        with world:
            if way == "bare":
                _bare(name)(*args)
            else:
                _bare(name)(*args, async_op=True).wait()


async def _awaited(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    await function(*args)


def ring(world: mw.World, way: str, device: Any, base: float = 1.0) -> list[Any]:
    """Everyone sends to the next: as a batch, and one after the other; what came wrong."""
    rank, size = world.rank, world.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    out, into = full(rank + base, device), full(-7, device)
    if way == "batch":
        with world:
            ops = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
    elif way == "batch_method":
        with world:
            ops = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
        for work in world.batch_isend_irecv(ops):
            work.wait()
    else:
        steps = ["send", "recv"] if rank % 2 == 0 else ["recv", "send"]
        if size % 2 and rank == size - 1:
            steps = ["recv", "send"]
        for step in steps:
            _step(world, way, step, out if step == "send" else into, after if step == "send" else before)
    return [] if same(into, before + base) else [["ring", way, into.cpu().tolist(), before + base]]


def _step(world: mw.World, way: str, step: str, tensor: torch.Tensor, peer: int) -> None:
    if way == "method":
        getattr(world, step)(tensor, peer)
    elif way == "async":
        getattr(world, f"i{step}")(tensor, peer).wait()
    elif way == "aio":
        asyncio.run(_awaited(getattr(world.aio, step), (tensor, peer)))
    else:
        with world:
            if way == "bare":
                getattr(dist, step)(tensor, peer)
            else:
                getattr(dist, f"i{step}")(tensor, peer).wait()


def everything(world: mw.World, device: Any, base: float = 1.0, ways: tuple[str, ...] = WAYS) -> list[Any]:
    """Every operation in every way; what came wrong."""
    wrong: list[Any] = []
    for way in ways:
        for name in COLLECTIVES:
            if world.backend == "gloo" and name.startswith(("reduce_scatter", "all_to_all")):
                continue  # not in every version
            call = Call(name, world.rank, world.world_size, device, base)
            run(world, way, name, call.args)
            wrong += [[way, *each] for each in call.wrong()]
        wrong += ring(world, way, device, base)
    for way in ("batch", "batch_method"):
        wrong += ring(world, way, device, base)
    return wrong + objects(world)


def objects(world: mw.World) -> list[Any]:
    """The object collectives, as methods and awaited."""
    rank, size = world.rank, world.world_size
    wrong: list[Any] = []
    got: list[Any] = [None] * size
    world.all_gather_object(got, {"rank": rank})
    wrong += [] if got == [{"rank": r} for r in range(size)] else [["all_gather_object", got]]
    said = [f"from {rank}", rank]
    world.broadcast_object_list(said, 0)
    wrong += [] if said == ["from 0", 0] else [["broadcast_object_list", said]]
    into: list[Any] = [None]
    world.scatter_object_list(into, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    wrong += [] if into == [f"for {rank}"] else [["scatter_object_list", into]]
    got = [None] * size
    asyncio.run(_awaited(world.aio.all_gather_object, (got, rank)))
    wrong += [] if got == list(range(size)) else [["aio.all_gather_object", got]]
    with world:
        torch.cuda.set_device(world.device) if world.device.type == "cuda" else None
        got = [None] * size
        dist.all_gather_object(got, rank)
    wrong += [] if got == list(range(size)) else [["bare all_gather_object", got]]
    return wrong


@contextlib.contextmanager
def broken(me: Rank, name: str, **fields: Any) -> Iterator[None]:
    """A block that must end with BrokenWorldException: its event has ``kind``, ``cause``, ``ms`` since the entry."""
    began = time.monotonic()
    kind, cause, text = "none", "", ""
    try:
        yield
    except BaseException as exc:  # noqa: BLE001 -- whatever it is, is the observation
        kind, text = type(exc).__name__, str(exc)[:500]
        cause = str(getattr(exc, "cause", ""))
    me.event(name, kind=kind, cause=cause, text=text, ms=(time.monotonic() - began) * 1000, **fields)


def held() -> dict[str, int]:
    """What this process holds: threads of Python and of the kernel, file descriptors, kilobytes of memory."""
    gc.collect()
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)  # noqa: PTH123, SIM115
    return {
        "python_threads": threading.active_count(),
        "threads": int(status["Threads"]),
        "fds": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "kb": int(status["VmRSS"].split()[0]),
    }
