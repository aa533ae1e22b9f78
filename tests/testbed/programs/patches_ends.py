"""The programs behind test_patches_ends.py: the ends of patched groups, and of what the patches leave alone.

``config`` as in `programs.patches`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from programs.patches import FOREVER, aborted, lose_peer, ones, threads, until, warm, world

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank

HANG = round(FOREVER * 1000)  # ms


def backend_of(me: Rank) -> Any:
    return dist.group.WORLD._get_backend(me.device)


def shutdown_of(me: Rank) -> Callable[[], None]:
    """What destroy_process_group() calls."""
    backend = backend_of(me)
    return getattr(backend, "shutdown", None) or backend._shutdown


def abort_over(me: Rank) -> None:
    """NCCL's abort hangs for longer than torch waits for it, and returns ``result`` then."""
    world(me)
    warm(me)
    lose_peer(me)
    backend = backend_of(me)
    me.event("before", told=backend._is_initialized())
    me.bed.set("ABORT_HANG_MS", HANG)
    me.bed.set("ABORT_RESULT", me.config["result"])
    work = dist.all_reduce(ones(me), async_op=True)
    me.event("ready")
    me.event("aborted", seen=aborted(me))
    me.attempt("wait", work.wait)
    me.attempt("abort", backend.abort)
    me.event("hangs", told=backend._is_initialized())
    me.bed.set("ABORT_HANG_MS", 0)
    me.event("over", seen=until(lambda: not backend._is_initialized()))
    os._exit(0)


def maker_ends(me: Rank) -> None:
    """A thread makes a non-blocking communicator, which is aborted before it is ready, and ends. The abort takes a while."""
    world(me)
    if me.rank == 1:
        me.event("ready")
        time.sleep(FOREVER)
    me.bed.set("ABORT_HANG_MS", 1000)
    thread = threading.Thread(target=lambda: me.attempt("operation", lambda: dist.all_reduce(ones(me))))
    thread.start()
    me.event("ready")
    me.hear("abort", timeout=FOREVER)
    me.attempt("abort", backend_of(me).abort)
    thread.join()
    me.event("left", comms=me.bed.count("comms"))
    os._exit(0)


def split_aborted(me: Rank) -> None:
    """The watchdog aborts a group while it is split, which waits for a peer. ``members``: of the new group."""
    world(me, device_id=me.device, timeout=timedelta(seconds=3))
    warm(me)
    if me.rank == 1:
        me.hear("come", timeout=FOREVER)
        dist.new_group(me.config["members"])
        time.sleep(FOREVER)
    work = dist.all_reduce(ones(me), async_op=True)  # which times out
    me.attempt("operation", lambda: dist.new_group(me.config["members"]))
    me.event("aborts", count=me.bed.count("aborts"))
    me.hear("come", timeout=FOREVER)
    me.event("over", seen=until(lambda: me.bed.count("comms") == 0))
    del work
    os._exit(0)


def shrunk(me: Rank) -> None:
    """A group is made by shrinking another; its abort hangs."""
    world(me, device_id=me.device)
    warm(me)
    if me.rank == 2:
        time.sleep(FOREVER)
    group = dist.shrink_group([2])
    warm(me, group)
    me.bed.set("ABORT_HANG_MS", HANG)
    me.attempt("abort", group._get_backend(me.device).abort)
    me.attempt("operation", lambda: dist.all_reduce(ones(me), group=group))
    os._exit(0)


def no_threads(me: Rank) -> None:
    """The watchdog is to abort the group when the process can have no more threads.

    ``pair``: of two communicators. ``asked``: the program aborts it then, too.
    """
    world(me)
    warm(me)
    if me.config["pair"]:
        tensor = ones(me)
        (dist.send if me.rank else dist.recv)(tensor, 1 - me.rank)
        torch.cuda.current_stream().synchronize()
    lose_peer(me)
    work = dist.all_reduce(ones(me), async_op=True)
    me.bed.set("NO_THREADS", value=1)
    me.event("ready")
    me.hear("threads", timeout=FOREVER)
    if me.config["asked"]:
        me.attempt("refused", backend_of(me).abort)
    me.bed.set("NO_THREADS", value=0)
    me.event("aborted", seen=until(lambda: me.bed.count("comms") == 0))
    me.attempt("wait", work.wait)
    os._exit(0)


def no_threads_destroyed(me: Rank) -> None:
    """A group is destroyed when the process can have no more threads, and again when it can."""
    world(me)
    warm(me)
    destroy = shutdown_of(me)
    with me.bed.knobs(NO_THREADS=1):
        me.attempt("refused", destroy)
    me.attempt("destroyed", destroy)
    me.event("left", comms=me.bed.count("comms"))
    os._exit(0)


def destroy_hangs(me: Rank) -> None:
    """NCCL hangs in the destruction of a group, and the group is aborted beside it."""
    world(me)
    warm(me)
    me.bed.set("DESTROY_HANG_MS", HANG)
    threading.Thread(target=shutdown_of(me), daemon=True).start()
    me.event("destroying", seen=until(lambda: "pt_nccl_aside" in threads()))
    me.attempt("abort", backend_of(me).abort)
    os._exit(0)


def destroyed_beside(me: Rank) -> None:
    """The current stream waits for a broken group, whose abort hangs; another group is destroyed."""
    world(me)
    lost, kept = dist.new_group([0, 1]), dist.new_group([0, 2])
    if me.rank != 2:
        warm(me, lost)
    if me.rank != 1:
        warm(me, kept)
    if me.rank == 1:
        me.event("victim")
        time.sleep(FOREVER)
    if me.rank == 2:
        me.event("ready")
        time.sleep(FOREVER)
    me.bed.set("ABORT_HANG_MS", HANG)
    dist.all_reduce(ones(me), group=lost, async_op=True).wait()
    me.event("ready")
    me.event("aborted", seen=aborted(me))
    me.attempt("destroy", lambda: dist.destroy_process_group(kept))
    os._exit(0)


def barrier_other_mode(me: Rank) -> None:
    """A thread is in a barrier while the group's abort hangs, in a mode that the patches leave alone."""
    world(me)
    warm(me)
    if me.rank == 1:
        time.sleep(FOREVER)
    me.bed.set("ABORT_HANG_PHASE", "after")  # the barrier's stream goes on
    me.bed.set("ABORT_HANG_MS", HANG)
    me.bed.set("LAUNCH_HANG_MS", HANG)  # so the abort comes between the launch and the wait
    launched = me.bed.count("launches")
    thread = threading.Thread(target=lambda: me.attempt("barrier", dist.barrier))
    thread.start()
    until(lambda: me.bed.count("launches") > launched)
    threading.Thread(target=backend_of(me).abort, daemon=True).start()
    me.event("aborts", seen=aborted(me))
    me.bed.set("LAUNCH_HANG_MS", 0)
    thread.join()
    os._exit(0)


def calls(me: Rank) -> None:
    """A little of everything, with every call of NCCL on stderr (the knob TRACE), and a line before each step."""

    def step(name: str) -> None:
        print(f"step {name}", file=sys.stderr, flush=True)  # noqa: T201

    def pair() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, ones(me), 1 - me.rank), dist.P2POp(dist.irecv, ones(me), 1 - me.rank)]
        ):
            work.wait()

    def block() -> None:
        with c10d._coalescing_manager(device=me.device):
            for _ in range(2):
                dist.broadcast(ones(me), 0)

    def alone() -> None:
        (dist.send if me.rank else dist.recv)(ones(me), 1 - me.rank)

    steps = {
        "init": lambda: world(me, device_id=me.device),
        "all_reduce": lambda: warm(me),
        "barrier": dist.barrier,
        "batch": pair,
        "block": block,
        "single": alone,
        "new_group": lambda: warm(me, dist.new_group([0, 1])),
        "destroy": dist.destroy_process_group,
    }
    for name, do in steps.items():
        step(name)
        do()
        if name != "destroy":
            torch.cuda.synchronize()
    step("end")
    me.event("done")
    os._exit(0)
