"""Worlds on NCCL whose members all live: values, several worlds, leaving, rejoining, the ends of programs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import multiworld as mw
from programs.patches import threads
from programs.worldkit import everything, full, held, joined, meet, run, same, until

if TYPE_CHECKING:
    from bed.rank import Rank


def values(me: Rank) -> None:
    """Every operation in every way in one world; then close."""
    began = time.monotonic()
    world = joined(me)
    ms = (time.monotonic() - began) * 1000
    wrong = everything(world, me.device)
    me.event("values", wrong=wrong, join_ms=ms, device=str(world.device), repr=repr(world))
    meet(me, "done")
    began = time.monotonic()
    freed = world.close(30)
    me.event("closed", freed=freed, ms=(time.monotonic() - began) * 1000)


def several(me: Rank) -> None:
    """Worlds side by side: on one GPU, on another one, in threads, with gloo, and torch's own default group."""
    second = torch.device("cuda", 4 + me.rank)
    a, b = joined(me, "a"), joined(me, "b")
    c = joined(me, "c", device=str(second), rank=me.world_size - 1 - me.rank)
    g = joined(me, "g", backend="gloo")
    mixed = joined(me, "mixed", backend=f"cpu:gloo,cuda:{me.config.get('backend', 'nccl')}")
    me.init("gloo")  # torch's own
    wrong: list[Any] = []
    for round_ in range(3):
        for number, (world, device) in enumerate(((a, me.device), (b, me.device), (c, second), (g, "cpu"))):
            wrong += everything(world, device, base=10 * number + round_, ways=("method", "aio", "bare"))
    t, u = full(me.rank, "cpu"), full(me.rank, me.device)
    mixed.all_reduce(t)
    mixed.all_reduce(u)
    mixed.barrier()
    total = sum(range(me.world_size))
    wrong += [] if same(t, total) and same(u, total) else [["mixed", t.tolist(), u.cpu().tolist()]]
    own = full(me.rank + 1, "cpu")
    dist.all_reduce(own)
    wrong += [] if same(own, total + me.world_size) else [["torch's own", own.tolist()]]

    def work(world: mw.World, device: Any, found: list[Any]) -> None:
        for value in range(30):
            t = full(world.rank + value, device)
            world.all_reduce(t)
            if not same(t, total + value * me.world_size):
                found.append([world.name, value, t.cpu().tolist()])

    threads = [
        threading.Thread(target=work, args=(world, device, wrong))
        for world, device in ((a, me.device), (b, me.device), (c, second), (g, "cpu"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    me.event(
        "values", wrong=wrong, alive=[thread.is_alive() for thread in threads], worlds=sorted(mw.worlds())
    )
    meet(me, "done")
    for world in (a, b, c, g, mixed):
        world.close()
    dist.destroy_process_group()
    _settled(me, 0)
    me.event("closed", comms=me.bed.count("comms") if me.bed else 0)


def again(me: Rank) -> None:
    """Leave and rejoin, many times; what is left of it."""
    world = joined(me)
    wrong: list[Any] = []
    seen: list[int] = []
    for cycle in range(me.config["cycles"]):
        t = full(me.rank + cycle, me.device)
        world.all_reduce(t)
        wrong += (
            [] if same(t, sum(range(me.world_size)) + cycle * me.world_size) else [[cycle, t.cpu().tolist()]]
        )
        seen.append(world.generation)
        meet(me, f"cycle {cycle}")
        if cycle == 4:  # whatever is made once is made by now
            _settled(me, 1)
            me.event("before", **held(), comms=me.bed.count("comms") if me.bed else 0)
        if me.rank == cycle % me.world_size:
            world.close()
        else:
            with contextlib.suppress(mw.BrokenWorldException):
                while True:
                    world.barrier()
        world.rejoin()
    _settled(me, 1)
    me.event("after", wrong=wrong, generations=seen, **held(), comms=me.bed.count("comms") if me.bed else 0)
    meet(me, "done")
    world.close()
    _settled(me, 0)
    me.event("closed", comms=me.bed.count("comms") if me.bed else 0, **held())


def _settled(me: Rank, comms: int) -> None:
    """Wait until no more communicators are left: aborts have threads of their own, as the double's streams have."""
    if me.bed is not None:
        until(lambda: me.bed.count("comms") <= comms and "m8d-stream" not in threads())


def ends(me: Rank) -> None:
    """Return, or end, with worlds open: nothing pending, or an operation that nobody answers."""
    world = joined(me)
    other = joined(me, "other")
    t = full(1, me.device)
    world.all_reduce(t)
    how = me.config["how"]
    work = None
    if how == "pending" and me.rank == 0:
        work = other.irecv(full(0, me.device), 1)
    if how == "thread" and me.rank == 0:
        threading.Thread(target=lambda: other.recv(full(0, me.device), 1), daemon=True).start()
    if how == "exit" and me.rank == 0:
        os._exit(3)
    me.event("ready", pending=work is not None)
    me.hear("go")


def devices(me: Rank) -> None:
    """Tensors where the world's are not, and what the world says of its device."""
    with torch.cuda.device(me.rank + 2):
        mine = joined(me, "current", device=None)
    told = {"current": str(mine.device)}
    t = full(1, mine.device)
    mine.all_reduce(t)
    plain = joined(me, "plain", device="cuda")
    told["plain"] = str(plain.device)
    world = joined(me)
    errors: dict[str, Any] = {}
    cpu, elsewhere = full(1, "cpu"), full(1, torch.device("cuda", 7))
    calls: dict[str, Any] = {
        "method cpu": lambda: world.all_reduce(cpu),
        "method elsewhere": lambda: world.all_reduce(elsewhere),
        "send elsewhere": lambda: world.send(elsewhere, 1 - me.rank),
        "bare cpu": lambda: run(world, "bare", "all_reduce", (cpu,)),
        "bare elsewhere": lambda: run(world, "bare", "all_reduce", (elsewhere,)),
        "aio elsewhere": lambda: run(world, "aio", "all_reduce", (elsewhere,)),
    }
    for name, call in calls.items():
        try:
            call()
            errors[name] = "none"
        except Exception as exc:  # noqa: BLE001, PERF203 -- whatever it is, is the observation
            errors[name] = type(exc).__name__
    t = full(me.rank, me.device)
    world.all_reduce(t)
    value = t.cpu().tolist()
    came = torch.zeros_like(cpu)
    world.send(cpu + me.rank, 1 - me.rank)  # messages of the CPU's tensors need no backend
    world.recv(came, 1 - me.rank)
    message = came.tolist()
    me.event("devices", told=told, errors=errors, value=value, message=message, state=str(world.state.value))
    meet(me, "done")


def guards(me: Rank) -> None:
    """What is set and said before the first world, and what the doctor says."""
    import warnings

    from multiworld.shim.report import status

    assert me.meeting_point is not None  # made before there is a world
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = status().as_dict()
        world = mw.join(
            "w", rank=me.rank, world_size=me.world_size, store=f"tcp://127.0.0.1:{me.store_ports[0]}",
            backend=me.config["backend"], device=str(me.device),
        )  # fmt: skip
    names = [name for name in os.environ if name.startswith(("TORCH_NCCL", "NCCL_"))]
    me.event(
        "guards",
        status=found,
        said=[str(each.message) for each in said if issubclass(each.category, RuntimeWarning)],
        environment={name: os.environ[name] for name in names},
        wrong=everything(world, me.device, ways=("method",)),
    )
    meet(me, "done")
