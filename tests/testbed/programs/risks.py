"""A peer is killed or stopped at the moments in which real NCCL and CUDA may do what a fake does not."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from programs.worldkit import full, joined, same, until

if TYPE_CHECKING:
    from bed.rank import Rank

_LONG = 600.0  # seconds; what ends earlier was ended by the fault
_LATE = 3.0
"""Seconds in which an aborted kernel may still write: hardware showed 2.8."""


def destroyed(me: Rank) -> None:
    """Plain torch: the group is destroyed with an operation pending, and then its peer is lost."""
    me.init(me.config["backend"], timeout=me.config["timeout"])
    t = full(1, me.device)
    dist.all_reduce(t)
    torch.cuda.synchronize()
    if me.rank:
        _is_lost(me)
    work = dist.all_reduce(t, async_op=True)
    me.event("pending")
    me.attempt("told", dist.destroy_process_group)
    del work


def absent(me: Rank) -> None:
    """Plain torch: the program ends while a thread makes a communicator, with a peer that never comes."""
    me.init(me.config["backend"], timeout=me.config["timeout"])
    if me.rank:
        _is_lost(me)
    t = full(1, me.device)
    threading.Thread(target=dist.all_reduce, args=(t,), daemon=True).start()
    me.event("pending")
    me.hear("end", timeout=_LONG)


def cold(me: Rank) -> None:
    """A world's first receive from a peer: NCCL connects inside the call, and the peer is lost meanwhile."""
    world = joined(me)
    if me.rank:
        _is_lost(me)
    me.event("pending")
    me.attempt("told", lambda: world.recv(full(0, me.device), 1))
    world.close()


def overwritten(me: Rank) -> None:
    """The sender of a large payload is lost in its middle; after the exception the tensor is the caller's.

    With ``plain`` in the configuration the group is torch's, and the caller polls.
    """
    if me.config.get("plain"):
        me.init(me.config["backend"], timeout=me.config["timeout"])
        group: Any = dist
    else:
        group = joined(me)
    payload = torch.empty(me.config["bytes"], dtype=torch.uint8, device=me.device).fill_(me.rank)
    group.send(full(1, me.device), 0) if me.rank else group.recv(full(0, me.device), 1)  # connected
    torch.cuda.synchronize()
    me.event("pending")
    if me.rank:
        for _ in range(me.config["messages"]):
            group.send(payload, 0)
        _is_lost(me)
    count = 0

    def receive() -> None:
        nonlocal count
        while True:
            if group is dist:
                work = dist.irecv(payload, 1)
                until(work.is_completed, _LONG)
                work.wait()
            else:
                group.recv(payload, 1)
            count += 1

    me.attempt("told", receive)
    payload.fill_(7)
    torch.cuda.synchronize()
    time.sleep(_LATE)
    me.event("after", kept=bool(payload.cpu().eq(7).all()), whole=count)
    dist.destroy_process_group() if group is dist else group.close()


def beside(me: Rank) -> None:
    """Rank 0 is in two worlds; while NCCL aborts one of them, how long does an operation of the other take?"""
    if me.rank == 1:
        world = joined(me, "lost", rank=1, world_size=2)
        world.all_reduce(full(1, me.device))
        _is_lost(me)
    if me.rank == 0:
        lost = joined(me, "lost", rank=0, world_size=2)
        lost.all_reduce(full(1, me.device))
    lives = joined(me, "lives", rank=me.rank // 2, world_size=2)
    if me.rank == 2:
        me.event("pending")
        while _summed(lives, me, 1.0) > 0:
            pass
        lives.close()
        return
    over, spans, wrong = threading.Event(), [], []

    def works() -> None:
        torch.cuda.set_device(me.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not over.is_set():
                began = time.monotonic()
                if _summed(lives, me, 1.0) != 2:
                    wrong.append(began)
                spans.append((began, time.monotonic() - began))
            _summed(lives, me, -9.0)

    worker = threading.Thread(target=works)
    worker.start()
    until(lambda: len(spans) > me.config["before"])
    me.event("pending")
    since = time.monotonic()
    me.attempt("told", lambda: lost.all_reduce(full(1, me.device)))
    time.sleep(_LATE)
    over.set()
    worker.join()
    before = [span for began, span in spans if began < since]
    after = [span for began, span in spans if began >= since]
    me.event("beside", wrong=len(wrong), before=_worst_ms(before), after=_worst_ms(after), count=len(after),
             held_ms=me.config["held_ms"])  # fmt: skip
    lost.close()
    lives.close()


def _summed(world: Any, me: Rank, value: float) -> float:
    t = full(value, me.device, 1)
    world.all_reduce(t)
    return float(t.cpu().item())


def _worst_ms(spans: list[float]) -> float:
    return 1000 * max(spans)


def graphed(me: Rank) -> None:
    """A CUDA graph that holds an operation of the world is alive while NCCL aborts the world."""
    world = joined(me)
    t, graph = full(1, me.device), torch.cuda.CUDAGraph()
    with world:
        dist.all_reduce(t)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_reduce(t)
        graph.replay()
    torch.cuda.synchronize()
    me.event("replayed", right=same(t, 4))
    if me.rank:
        _is_lost(me)
    me.event("pending")
    me.attempt("told", lambda: world.all_reduce(full(1, me.device)))
    me.attempt("closed", world.close)
    del graph


def asserted(me: Rank) -> None:
    """A kernel of rank 1 asserts: CUDA is of no more use to that process, which must still end by itself."""
    world = joined(me)
    world.all_reduce(full(1, me.device))
    me.event("pending")
    if me.rank:
        torch._assert_async(torch.zeros(1, device=me.device))
        me.attempt("sticky", torch.cuda.synchronize)
        me.attempt("later", lambda: world.all_reduce(full(1, me.device)))
    else:
        me.attempt("told", lambda: world.all_reduce(full(1, me.device)))
    me.attempt("closed", world.close)


def _is_lost(me: Rank) -> None:
    """The test kills or stops this rank; one that it needs no more ends."""
    me.event("pending")
    me.hear("lost", timeout=_LONG)
    raise SystemExit(0)
