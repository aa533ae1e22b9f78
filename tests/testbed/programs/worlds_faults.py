"""Worlds on NCCL that lose a member, or whose NCCL fails; what goes on beside them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import multiworld as mw
from programs.worldkit import PACE, Call, broken, everything, full, held, joined, meet, run, same, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank


ODD = frozenset({
    "coalesced", "functional", "future", "functional_all_to_all", "functional_coalesced", "ddp",
    "functional_autograd", "mesh", "new_group",
})  # fmt: skip


class Neighbours:
    """Two worlds that must not notice: another one on NCCL, among the survivors, and one on gloo with them."""

    def __init__(self, me: Rank) -> None:
        self.me = me
        self.wrong: list[Any] = []
        self.rounds = 0
        self.slowest = 0.0
        self._asked, self._agreed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.worlds: list[tuple[mw.World, Any]] = []
        self.worlds = [
            (joined(me, "beside"), me.device),
            (joined(me, "beside-gloo", backend="gloo"), torch.device("cpu")),
        ]

    def start(self) -> None:
        """Work in them in a thread, until `stop`."""
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._agreed.is_set():
                self.once()
                time.sleep(PACE)
        except BaseException as exc:  # noqa: BLE001 -- told
            self.wrong.append([type(exc).__name__, str(exc)[:500]])

    def once(self) -> None:
        """One all_reduce in each; all members go on until all want to stop."""
        for number, (world, device) in enumerate(self.worlds):
            began = time.monotonic()
            flag, t = full(float(self._asked.is_set()), device, 1), full(self.rounds + world.rank, device)
            world.all_reduce(t)
            world.all_reduce(flag)
            n = world.world_size
            self.wrong += (
                []
                if same(t, n * self.rounds + n * (n - 1) / 2)
                else [[number, self.rounds, t.cpu().tolist()]]
            )
            self.slowest = max(self.slowest, time.monotonic() - began)
            if number == len(self.worlds) - 1 and flag.cpu().item() == n:
                self._agreed.set()
        self.rounds += 1

    def stop(self) -> dict[str, Any]:
        """Stop together; what was seen."""
        self._asked.set()
        if self._thread is not None:
            self._thread.join(60)
            if self._thread.is_alive():
                self.wrong.append(["the thread of the worlds beside does not end"])
        return {"wrong": self.wrong, "rounds": self.rounds, "slowest_ms": self.slowest * 1000}


def _never(world: mw.World, way: str, name: str, device: Any) -> Any:
    """An operation that the victim never answers, to its end."""
    size, victim = world.world_size, world.world_size - 1
    if name in {"recv", "send"}:
        return _point(world, way, name, full(-7, device), victim)
    if name == "batch":
        return _batch(world, device, victim)
    if name in ODD:
        return _odd(world, way, name, device)
    call = Call(name, world.rank, size, device)
    run(world, way, name, call.args)
    return call.wrong()


def _point(world: mw.World, way: str, name: str, tensor: torch.Tensor, peer: int) -> Any:
    if name == "send":
        tensor = torch.zeros(4 << 20).to(tensor.device)  # more than any buffer takes
    if way == "method":
        getattr(world, name)(tensor, peer)
    elif way == "async":
        getattr(world, f"i{name}")(tensor, peer).wait()
    elif way == "aio":
        asyncio.run(_awaited(getattr(world.aio, name), tensor, peer))
    else:
        with world:
            if way == "bare":
                getattr(dist, name)(tensor, peer)
            else:
                getattr(dist, f"i{name}")(tensor, peer).wait()
    return tensor[:1].cpu().tolist()


async def _awaited(function: Callable[..., Any], *args: Any) -> None:
    await function(*args)


def _batch(world: mw.World, device: Any, peer: int) -> Any:
    into = full(-7, device)
    with world:
        ops = [dist.P2POp(dist.isend, full(1, device), peer), dist.P2POp(dist.irecv, into, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return into.cpu().tolist()


class Scaled(torch.nn.Module):
    """A model of one parameter, of the size of its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


def _block(world: mw.World, way: str) -> contextlib.AbstractContextManager[Any]:
    """The block in which the operation of `world` is called: its own, none, or another world's."""
    if way == "outside":
        return contextlib.nullcontext()
    return mw.worlds()["beside-gloo"] if way == "elsewhere" else world


def _odd(world: mw.World, way: str, name: str, device: Any) -> Any:
    t, u = full(1, device), full(2, device)
    group = world.group
    with _block(world, way):
        if name == "coalesced":
            from torch.distributed.distributed_c10d import _coalescing_manager

            with _coalescing_manager(device=device, async_ops=True) as cm:
                dist.all_reduce(t)
                dist.all_reduce(u)
            cm.wait()
        elif name == "functional":
            from torch.distributed._functional_collectives import all_reduce, wait_tensor

            t = wait_tensor(all_reduce(t, "sum", group))
        elif name == "functional_all_to_all":
            from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

            n = world.world_size
            t = wait_tensor(all_to_all_single(full(1, device, 2 * n), [2] * n, [2] * n, group))
        elif name == "functional_coalesced":
            from torch.distributed._functional_collectives import all_reduce_coalesced, wait_tensor

            t, u = (wait_tensor(each) for each in all_reduce_coalesced([t, u], "sum", group))
        elif name == "functional_autograd":
            from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

            n = world.world_size
            t = wait_tensor(all_to_all_single_autograd(full(1, device, 2 * n), [2] * n, [2] * n, group))
        elif name == "new_group":
            # Torch would split the world's communicator for it, which all members do: those outside of it with
            # the GIL held.
            dist.new_group([1])
            dist.new_group()
        elif name == "mesh":
            from torch.distributed.device_mesh import init_device_mesh

            # Of its first dimension torch makes the groups by splitting the world's.
            mesh = init_device_mesh("cuda", (1, world.world_size), mesh_dim_names=("one", "all"))
            dist.all_reduce(t, group=mesh.get_group("all"))
        elif name == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            module = Scaled(t.numel()).to(device)
            # Made without a collective: the victim would have to take part.
            model = DistributedDataParallel(
                module, process_group=group, init_sync=False, broadcast_buffers=False
            )
            model(t).backward(u)
            t = module.factor.grad
        else:
            dist.all_reduce(t, async_op=True).get_future().wait()
    return t.cpu().tolist()


def survives(me: Rank) -> None:
    """A world with one member more than there are ranks here, which is lost in each case, and replaced.

    Each case is an operation that the lost one never answers. It must raise; then the next generation is joined, with
    values. All the while two worlds of the ranks here go on.
    """
    size = me.world_size + 1
    beside = Neighbours(me)
    me.event("store", port=me.store_ports[0])
    world = joined(me, world_size=size, timeout=me.config.get("timeout", 60))
    beside.start()
    wrong: list[Any] = []
    for number, case in enumerate(me.config["cases"]):
        way, name = case["way"], case["name"]
        t = full(me.rank + number, me.device)
        world.all_reduce(t)
        wrong += [] if same(t, size * number + size * (size - 1) / 2) else [[number, t.cpu().tolist()]]
        told: list[str] = []
        forget = world.on_break(lambda w, told=told: told.append(w.breakage.cause.value))
        me.event("ready", case=number)
        values: Any = None
        with broken(me, "broken", way=way, op=name, case=number):
            values = _never(world, way, name, me.device)
        later = {}
        for other in ("method", "bare", "aio"):
            try:
                run(world, other, "all_reduce", (full(1, me.device),))
                later[other] = "none"
            except Exception as exc:  # noqa: BLE001, PERF203 -- the observation
                later[other] = type(exc).__name__
        forget()
        depth = me.bed.count("group_depth") if me.bed else 0
        me.event("after", case=number, values=values, state=world.state.value, cause=world.breakage.cause.value,
                 ranks=list(world.breakage.ranks), later=later, told=told, depth=depth)  # fmt: skip
        me.hear("go", timeout=600)
        if number + 1 < len(me.config["cases"]):
            began = time.monotonic()
            world.rejoin()
            me.event(
                "rejoined", case=number, generation=world.generation, ms=(time.monotonic() - began) * 1000
            )
        if number == 2:
            me.event("before", **held(), comms=me.bed.count("comms") if me.bed else 0)
    seen = beside.stop()
    connecting = me.config.get("connecting", 0)
    if me.bed:
        until(
            lambda: me.bed is None or me.bed.count("comms") <= 1 + connecting
        )  # aborts have threads of their own
    me.event("values", wrong=wrong, beside=seen, **held(), comms=me.bed.count("comms") if me.bed else 0)
    meet(me, "done")
    world.close()
    for each, _ in beside.worlds:
        each.close()
    if me.bed:
        until(lambda: me.bed is None or me.bed.count("comms") == connecting)
    me.event("closed", comms=me.bed.count("comms") if me.bed else 0)


def victim(me: Rank) -> None:
    """The member that is lost: it takes part in one operation, and then does nothing."""
    rank, size, number = me.config["rank"], me.config["size"], me.config["case"]
    me.store_ports[:] = [me.config["port"]]
    world = joined(me, rank=rank, world_size=size, timeout=60)
    t = full(rank + number, me.device)
    world.all_reduce(t)
    me.event("ready", value=t.cpu().tolist())
    me.hear("leave", timeout=600)
    world.close()
    me.event("left")
    me.hear("end", timeout=600)


def enqueues(me: Rank) -> None:
    """NCCL refuses an operation of one world while it is enqueued; another world is used by the same thread."""
    assert me.bed is not None
    healthy = joined(me, "healthy")
    world = joined(me)
    wrong: list[Any] = []
    for number, case in enumerate(me.config["cases"]):
        way, name, fault = case["way"], case["name"], case.get("fault", "enqueue")
        failing = (
            me.bed.group_end_fails(6)
            if fault == "group_end"
            else me.bed.enqueue_fails(6, after=case.get("after", 0))
        )
        with (
            failing if me.rank == 0 else contextlib.nullcontext(),
            broken(me, "broken", way=way, op=name, case=number),
        ):
            values = _case(world, way, name, me.device)
            me.event("returned", case=number, values=values)
        # On this thread, at once: an NCCL group that is left open would swallow it.
        t = full(me.rank + number, me.device)
        healthy.all_reduce(t)
        wrong += [] if same(t, 2 * number + 1) else [["healthy", way, name, t.cpu().tolist()]]
        # The other one may have been through with its part, and hears of it in a moment.
        until(lambda: world.state.value != "active")
        me.event("after", case=number, depth=me.bed.count("group_depth"), state=world.state.value,
                 cause=world.breakage.cause.value if world.breakage else "", healthy=healthy.state.value)  # fmt: skip
        if world.state.value != "active":
            world.rejoin()
        t = full(me.rank, me.device)
        world.all_reduce(t)
        wrong += [] if same(t, 1) else [["again", way, name, t.cpu().tolist()]]
    wrong += everything(healthy, me.device, ways=("method",))
    until(lambda: me.bed is None or me.bed.count("comms") <= 2)
    me.event("values", wrong=wrong, comms=me.bed.count("comms"))
    meet(me, "done")
    world.close()
    healthy.close()


def _case(world: mw.World, way: str, name: str, device: Any) -> Any:
    peer = 1 - world.rank
    if name in {"send", "recv"}:
        # One sends, the other receives.
        return _point(
            world,
            way,
            name if world.rank == 0 else {"send": "recv", "recv": "send"}[name],
            full(0, device),
            peer,
        )
    if name == "batch":
        return _batch(world, device, peer)
    if name in ODD:
        return _odd(world, way, name, device)
    call = Call(name, world.rank, world.world_size, device)
    run(world, way, name, call.args)
    return call.wrong()
