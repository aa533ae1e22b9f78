"""The programs behind test_patches_*.py: each meets one fault, and tells what its caller is told.

``config`` in all of them: ``backend``; everything else is said at the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank

STALE = 1.0
FOREVER = 600.0
POLL = 0.005


def world(me: Rank, *, prefix: str = "A", ranks: tuple[int, ...] | None = None, **more: Any) -> None:
    """Make the default group of some of the ranks (default: all), behind a prefix in the store."""
    torch.cuda.set_device(me.device)
    members = ranks or tuple(range(me.world_size))
    dist.init_process_group(
        me.config.get("backend", "nccl"),
        store=dist.PrefixStore(prefix, me.store()),
        rank=members.index(me.rank),
        world_size=len(members),
        **more,
    )


def ones(me: Rank, count: int = 4) -> torch.Tensor:
    """A tensor on the device; no sum over two ranks or more leaves it as it is."""
    return torch.full((count,), STALE).to(me.device)


def warm(me: Rank, group: Any = None) -> None:
    """Make the communicator, and see that it works."""
    tensor = ones(me)
    dist.all_reduce(tensor, group=group)
    torch.cuda.current_stream().synchronize()  # not the device's: other streams may hang
    assert tensor[0].item() > STALE


def until(done: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Wait for something; False when it did not come."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def raises(function: Callable[[], Any]) -> bool:
    try:
        function()
    except Exception:  # noqa: BLE001 -- whatever it is
        return True
    return False


def lose_peer(me: Rank) -> None:
    """The last rank stays here until it is killed."""
    if me.rank == me.world_size - 1:
        me.event("victim")
        time.sleep(FOREVER)


def aborted(me: Rank, seconds: float = 30.0) -> bool:
    """Wait until ncclCommAbort was called in this process."""
    return until(lambda: me.bed.count("aborts") > 0, seconds)


def ask(me: Rank, work: Any, tensor: torch.Tensor) -> None:
    """Ask a broken work everything a caller can ask, ending with the group's next operation."""
    me.attempt("exception", lambda: None if work.exception() is None else str(work.exception()))
    me.attempt("result", lambda: str(work.get_future_result().value()))
    me.attempt("wait", work.wait)
    me.attempt("synchronize", work.synchronize)
    me.attempt("is_completed", work.is_completed)
    me.attempt("value", tensor[0].item)
    me.attempt("later", lambda: dist.all_reduce(ones(me)))


def broken_work(me: Rank) -> None:
    """D1: a peer dies with an operation pending. ``future`` keeps only the future of a work.

    The watchdog aborts first and tells futures next, in another thread than this one.
    """
    world(me)
    warm(me)
    lose_peer(me)
    tensor, other = ones(me), ones(me)
    work = dist.all_reduce(tensor, async_op=True)
    future = dist.all_reduce(other, async_op=True).get_future()
    me.event("ready")
    me.event("aborted", seen=aborted(me))
    until(lambda: raises(future.wait), 1.0)
    me.attempt("future", lambda: future.wait()[0].tolist()[0])
    ask(me, work, tensor)
    me.event("threads", names=threads())
    os._exit(0)


def blocked(me: Rank) -> None:
    """A caller is inside a blocking call when its peer dies. ``how``: barrier, timeout, stream, wait."""
    world(me)
    warm(me)
    lose_peer(me)
    for name, value in me.config.get("knobs", {}).items():
        me.bed.set(name, value)
    tensor = ones(me)
    if me.config["how"] == "barrier":
        work = dist.barrier(async_op=True)
        call = work.wait
    else:
        work = dist.all_reduce(tensor, async_op=True)
        call = {
            "timeout": lambda: work.wait(timeout=torch.distributed.default_pg_timeout),
            "wait": work.wait,
            "stream": lambda: [work.wait(), torch.cuda.current_stream().synchronize()][1],
        }[me.config["how"]]
    me.event("ready")
    me.attempt("let go", call)
    me.attempt("again", work.wait)
    me.attempt("later", lambda: dist.all_reduce(ones(me)))
    os._exit(0)


def idle(me: Rank) -> None:
    """D2, D3: a peer dies, the group is cleaned up, and the process goes on for a while."""
    world(me)
    warm(me)
    lose_peer(me)
    work = dist.all_reduce(ones(me), async_op=True)
    me.event("ready")
    me.event("aborted", seen=aborted(me))
    me.hear("go on", timeout=FOREVER)
    me.attempt("wait", work.wait)
    os._exit(0)


def slow_abort(me: Rank) -> None:
    """D4: ncclCommAbort hangs for longer than the watchdog may be silent."""
    world(me)
    warm(me)
    lose_peer(me)
    with me.bed.abort_hangs(me.config["hangs"], phase=me.config.get("phase", "before")):
        work = dist.all_reduce(ones(me), async_op=True)
        me.event("ready")
        me.event("aborted", seen=aborted(me))
        me.attempt("wait", work.wait)
        me.hear("go on", timeout=FOREVER)
    os._exit(0)


def coalesced_error(me: Rank) -> None:
    """D5: a call inside a coalesced operation fails; ``call`` says which kind of coalescing."""
    world(me)
    warm(me)
    tensors = [ones(me), ones(me)]
    group = dist.group.WORLD

    def managed() -> None:
        with c10d._coalescing_manager(device=me.device):
            group.allreduce([tensors[0]])
            group.allreduce([tensors[1]])

    calls = {"coalesced": lambda: group.allreduce_coalesced(tensors) and None, "managed": managed}
    with me.bed.enqueue_fails(6, kind="AllReduce"):
        me.attempt("call", calls[me.config["call"]])
    me.event("depth", depth=me.bed.count("group_depth"))
    os._exit(0)


def open_group(me: Rank) -> None:
    """D6: a call on one group fails; then the same thread uses a healthy group.

    ``call``: what fails. The last three fail without NCCL: by a type NCCL has not, by a tensor no backend is for, and
    by the program's own error between two calls of a coalesced operation.
    """
    world(me)
    healthy = dist.new_group([*range(me.world_size)])
    warm(me)
    warm(me, healthy)
    torch.cuda.synchronize()
    peer = (me.rank + 1) % me.world_size
    given, out = ones(me), ones(me)
    many = [ones(me) for _ in range(me.world_size)]

    def batch(wrong: torch.Tensor | None = None) -> None:
        second = out if wrong is None else wrong
        dist.batch_isend_irecv([dist.P2POp(dist.isend, given, peer), dist.P2POp(dist.irecv, second, peer)])

    def user() -> None:
        with c10d._coalescing_manager(device=me.device):
            dist.group.WORLD.allreduce([given])
            raise ValueError("the program's own")

    calls: dict[str, Callable[[], Any]] = {
        "send": lambda: dist.send(given, peer),
        "recv": lambda: dist.recv(out, peer) and None,
        "batch": batch,
        "gather": lambda: dist.gather(given, many if me.rank == 0 else None),
        "scatter": lambda: dist.scatter(out, many if me.rank == 0 else None),
        "all_to_all": lambda: dist.all_to_all(many, [ones(me) for _ in many]),
        "all_to_all_single": lambda: dist.all_to_all_single(ones(me), ones(me)),
        "type": lambda: batch(torch.zeros(4, dtype=torch.int16).to(me.device)),
        "argument": lambda: batch(torch.ones(4)),
        "user": user,
    }
    call = me.config["call"]
    if call in ("type", "argument", "user"):
        me.attempt("call", calls[call])
    else:
        with me.bed.enqueue_fails(6):
            me.attempt("call", calls[call])
    me.event("depth", depth=me.bed.count("group_depth"))

    def after() -> float:
        tensor = ones(me)
        work = healthy.allreduce([tensor])
        # Where the group stayed open nothing was launched, and the end is not waited for.
        until(work.is_completed, 10.0)
        return tensor.cpu()[0].item()

    me.attempt("healthy", after)
    me.event("done")
    me.hear("end", timeout=FOREVER)
    os._exit(0)


def same_group(me: Rank) -> None:
    """A coalesced operation fails; then the same group is used again.

    ``how``: nccl, argument, user; between: the user's own, after a call that was queued; type: one NCCL does not have.
    """
    world(me)
    warm(me)
    peer = (me.rank + 1) % me.world_size

    def batch(out: torch.Tensor) -> None:
        given = ones(me)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, given, peer), dist.P2POp(dist.irecv, out, peer)]
        ):
            work.wait()

    def user() -> None:
        with c10d._coalescing_manager(device=me.device):
            if me.config["how"] == "between":
                dist.broadcast(ones(me), 0)
            raise ValueError("the program's own")

    if me.config["how"] == "nccl":
        with me.bed.enqueue_fails(6):
            me.attempt("call", lambda: batch(ones(me)))
    elif me.config["how"] in ("user", "between"):
        me.attempt("call", user)
    else:
        bad = torch.ones(4)
        me.attempt(
            "call", lambda: batch(bad.to(torch.int16).to(me.device) if me.config["how"] == "type" else bad)
        )
    tensor, out = ones(me), torch.zeros(4).to(me.device)
    me.attempt("again", lambda: dist.all_reduce(tensor))
    torch.cuda.current_stream().synchronize()
    me.attempt("value", lambda: tensor.tolist()[0])
    if me.config["how"] == "nccl":  # nothing was queued: both sides may try again
        me.attempt("batch", lambda: batch(out))
        me.attempt("received", lambda: out.tolist()[0])
    me.event("depth", depth=me.bed.count("group_depth"))
    os._exit(0)


def user_group(me: Rank) -> None:
    """The program opens an NCCL group itself, around operations of two process groups. All is well.

    ``inside``: what each process group does there: plain operations, coalesced ones, or both.
    """
    world(me)
    other = dist.new_group([*range(me.world_size)])
    warm(me)
    warm(me, other)
    torch.cuda.synchronize()
    backend = dist.group.WORLD._get_backend(me.device)
    tensors: list[torch.Tensor] = []

    def operate(group: Any, *, coalesced: bool) -> None:
        mine = [ones(me), ones(me)]
        tensors.extend(mine)
        if coalesced:
            with c10d._coalescing_manager(group, device=me.device):
                for tensor in mine:
                    dist.all_reduce(tensor, group=group)
        else:
            for tensor in mine:
                dist.all_reduce(tensor, group=group)

    kinds = {"plain": [False], "coalesced": [True], "both": [True, False]}[me.config["inside"]]
    with me.bed.counting() as seen:
        backend._group_start()
        for coalesced in kinds:
            for group in (dist.group.WORLD, other):
                operate(group, coalesced=coalesced)
        depth, early = me.bed.count("group_depth"), seen.launches
        backend._group_end()
        me.event("group", depth=depth, early=early, launches=seen.launches)
    torch.cuda.synchronize()
    me.event("sums", values=[tensor.tolist()[0] for tensor in tensors])
    me.attempt("later", lambda: warm(me))
    me.event("depth", depth=me.bed.count("group_depth"))
    os._exit(0)


def dump_signal(me: Rank) -> None:
    """D7: worlds share a store server. Ranks 0 and 1 are world A, the others world B; 1 is lost.

    ``subgroup``: rank 2 is of world A as well, and only ranks 0 and 1 are in the group that breaks. ``split``: it is
    split from the default group, whose store's prefix looks like one of torch's own.
    """
    if me.config.get("subgroup"):
        members = (0, 1, 2) if me.rank < 3 else (3,)
    else:
        members = (0, 1) if me.rank < 2 else tuple(range(2, me.world_size))
    split = bool(me.config.get("split"))
    more = {"device_id": me.device} if split else {}
    world(me, prefix=("A" if 0 in members else "B") + "/" * split, ranks=members, **more)
    pair = dist.group.WORLD
    if split and 0 in members:
        warm(me)
        pair = dist.split_group(split_ranks=[[0, 1], [2]])
    elif me.config.get("subgroup") and 0 in members:
        pair = dist.new_group([0, 1])
    if len(members) > 1:
        warm(me)
    if me.rank == 1:
        warm(me, pair)
        me.event("victim")
        time.sleep(FOREVER)
    if me.rank == 0:
        warm(me, pair)
        work = dist.all_reduce(ones(me), group=pair, async_op=True)
        me.event("ready")
        me.event("aborted", seen=aborted(me))
    else:
        work = None
        me.event("ready")
    me.hear("go on", timeout=FOREVER)
    if work is None and 0 not in members and len(members) > 1:
        me.attempt("works", lambda: warm(me))
    os._exit(0)


def hung_abort(me: Rank) -> None:
    """D8: ncclCommAbort hangs. Rank 0 has the group ``lost`` with rank 1 and ``kept`` with rank 2."""
    world(me, timeout=c10d.default_pg_timeout)
    lost = dist.new_group([0, 1])
    kept = dist.new_group([0, 2])
    if me.rank != 2:
        warm(me, lost)
    if me.rank != 1:
        warm(me, kept)
    if me.rank == 1:
        me.event("victim")
        time.sleep(FOREVER)
    if me.rank == 2:
        me.event("ready")
        me.hear("sum", timeout=FOREVER)
        warm(me, kept)
        me.hear("end", timeout=FOREVER)
        os._exit(0)
    me.bed.set("ABORT_HANG_MS", round(me.config["hangs"] * 1000))
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        work = dist.all_reduce(ones(me), group=lost, async_op=True)
    me.event("ready")
    me.event("aborted", seen=aborted(me))
    me.hear("look", timeout=FOREVER)
    released = threading.Event()

    def release() -> None:
        me.hear("release", timeout=FOREVER)
        me.bed.set("ABORT_HANG_MS", 0)  # a hang ends with its knob
        released.set()

    threading.Thread(target=release, daemon=True).start()

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: me.attempt("other thread", lambda: warm(me, kept)))
        thread.start()
        thread.join()

    with torch.cuda.stream(aside):
        me.attempt("is_completed", work.is_completed)
        me.attempt("wait", work.wait)
        me.attempt("later", lambda: dist.all_reduce(ones(me), group=lost))
    elsewhere()
    me.attempt("destroy", lambda: dist.destroy_process_group(lost))
    me.event("threads", names=threads())
    if me.config.get("until_free"):
        released.wait(FOREVER)
        me.event("free", seen=until(lambda: "pt_nccl_aside" not in threads(), 60.0), names=threads())
        me.event("left", comms=me.bed.count("comms"))
    if me.config.get("exit") == "python":
        return
    os._exit(0)


def late_peer(me: Rank) -> None:
    """Making a communicator waits for a peer that does not come. ``let_go``: abort, timeout."""
    timeout = c10d.default_pg_timeout
    if me.config["let_go"] == "timeout":
        timeout = type(timeout)(seconds=3)
    if me.rank == 1:
        world(me, timeout=timeout)
        me.event("ready")
        time.sleep(FOREVER)
    world(me, timeout=timeout, **({"device_id": me.device} if me.config.get("eager") else {}))
    if me.config["let_go"] == "abort":

        def let_go() -> None:
            me.hear("abort", timeout=FOREVER)
            me.attempt("abort", dist.group.WORLD._get_backend(me.device).abort)

        threading.Thread(target=let_go, daemon=True).start()
    me.event("ready")
    me.attempt("operation", lambda: dist.all_reduce(ones(me)))
    me.attempt("destroy", dist.destroy_process_group)
    os._exit(0)


def late_error(me: Rank) -> None:
    """A non-blocking communicator is asked while it is in progress; the error that comes later must be seen."""
    world(me, device_id=me.device)
    warm(me)
    lose_peer(me)
    me.bed.set("NONBLOCKING_MS", 400)
    work = dist.all_reduce(ones(me), async_op=True)
    time.sleep(1.0)  # the watchdog asks ten times a second
    me.event("ready")
    me.event("aborted", seen=aborted(me, me.config["patience"]))
    me.attempt("wait", work.wait)
    os._exit(0)


def destroyed_busy(me: Rank) -> None:
    """A group is destroyed while its last operation waits for a peer; its communicator is non-blocking."""
    world(me, device_id=me.device)
    warm(me)
    if me.rank == 1:
        time.sleep(1.0)  # so long the other one has to wait
    tensor = ones(me)
    dist.all_reduce(tensor, async_op=True)
    me.attempt("destroy", dist.destroy_process_group)
    me.event("value", result=tensor.cpu()[0].item())


def destroyed_lost(me: Rank) -> None:
    """A group is destroyed while its last operation waits for a peer, which is lost then.

    ``sync``: a synchronous one. ``aside``: on another stream than the one that is current then.
    """
    world(me)
    warm(me)
    if me.rank == 1:
        me.event("ready")
        time.sleep(FOREVER)
    with torch.cuda.stream(torch.cuda.Stream()) if me.config.get("aside") else contextlib.nullcontext():
        dist.all_reduce(ones(me), async_op=not me.config.get("sync"))
    me.event("ready")
    me.attempt("destroy", dist.destroy_process_group)
    me.event("left", comms=me.bed.count("comms"))


def other_mode(me: Rank) -> None:
    """The abort hangs while another thread waits for an operation, in a mode that the patches leave alone."""
    world(me)
    warm(me)
    if me.rank == 1:
        time.sleep(FOREVER)
    work = dist.all_reduce(ones(me), async_op=True)
    abort = dist.group.WORLD._get_backend(me.device).abort
    threading.Thread(target=abort, daemon=True).start()
    me.event("aborts", seen=until(lambda: me.bed.count("aborts") > 0))
    me.attempt("wait", work.wait)
    os._exit(0)


def failing_hook(me: Rank) -> None:
    """An on-completion hook that raises."""
    calls = []

    def hook(info: Any) -> None:
        calls.append(info)
        raise RuntimeError("the hook's own")

    world(me)
    dist.group.WORLD._register_on_completion_hook(hook)
    warm(me)
    until(lambda: bool(calls))
    before = len(calls)
    # Ten times a second, where it is asked again at all.
    until(lambda: len(calls) > before + 5, me.config["patience"])
    me.event("calls", first=before, later=len(calls))
    os._exit(0)


def short_threads(me: Rank) -> None:
    """Threads use a group, each for one operation, and end before it does. The process ends as a program does.

    ``later``: the process has used a group in another mode before.
    """
    if me.config.get("later"):
        mode = os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
        world(me, prefix="first")
        warm(me)
        dist.destroy_process_group()
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = mode
    world(me)
    warm(me)
    for _ in range(20):
        thread = threading.Thread(target=lambda: dist.all_reduce(ones(me)))
        thread.start()
        thread.join()
    warm(me)
    dist.destroy_process_group()


def cycles(me: Rank) -> None:
    """Break and rebuild a group ``count`` times; every rank sees an asynchronous error of its own.

    It counts what there is after the fifth cycle, after the last one, and after each in which modules were imported:
    once in some hundreds of cycles torch loads its compiler (triton, sympy, numpy: 30 MB allocated, 150 MB resident)
    to resolve a stack (docs/upstream/legacy-stack-at-exit.md), and never again.
    """
    modules = 0
    for number in range(me.config["count"]):
        world(me, prefix=f"cycle-{number}")
        warm(me)
        tensor = ones(me)
        with me.bed.operations_hang():
            work = dist.all_reduce(tensor, async_op=True)
            with me.bed.async_error():
                broke = until(work.is_completed)
        message = ""
        try:
            work.wait()
        except dist.DistBackendError as exc:
            message = str(exc)
        dist.destroy_process_group()
        del work, tensor
        # A thread that was joined is seen for a moment more.
        until(lambda: {*threads()} <= {"python", "m8d-stream"} and me.bed.count("comms") == 0)
        loaded, modules = len(sys.modules) > modules, len(sys.modules)
        if number in (4, me.config["count"] - 1) or (number > 4 and loaded):
            me.event(
                "counted", number=number, broke=broke, text=message, threads=threads(), comms=me.bed.count("comms"),
                used=used(), rss=resident(), events=me.bed.count("events"), streams=me.bed.count("streams"),
            )  # fmt: skip
        elif not broke:
            me.event("counted", number=number, broke=broke, text=message)
    os._exit(0)


def threads() -> list[str]:
    """The names of this process's threads."""
    found = []
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append((each / "comm").read_text().strip())
    return sorted(found)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def used() -> float:
    """Megabytes that are allocated and not freed, of all of glibc's arenas; -1 before glibc 2.33.

    Not what the process has (`resident`): each cycle starts threads anew, which take their memory from whichever
    arena is free, and an arena keeps the pages of what was freed in it.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return -1.0
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return (found.uordblks + found.hblkhd) / 2**20


def resident() -> int:
    """Megabytes of memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20
