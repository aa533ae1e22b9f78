"""One program for each fault knob: what torch sees of it. Groups are made lazily, unless it says otherwise."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank

_LONG = 60.0  # seconds
_PEEK = 0.005


def _group(me: Rank, **more: Any) -> None:
    """Make the group, and its communicator."""
    me.init(me.config["backend"], timeout=600, **more)
    _reduce(me)


def _ones(me: Rank) -> torch.Tensor:
    return torch.ones(4).to(me.device)


def _reduce(me: Rank, group: Any = None) -> float:
    tensor = _ones(me)
    dist.all_reduce(tensor, group=group)
    return tensor.cpu()[0].item()


def _until(done: Callable[[], Any], seconds: float = _LONG) -> bool:
    """Look again and again until something is so; False if it never was."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PEEK)
    return True


def abort(me: Rank) -> None:
    """Abort a group with an operation pending, in a thread; look when the operation ends and when the abort does."""
    _group(me)
    with me.bed.operations_hang():
        work = dist.all_reduce(_ones(me), async_op=True)
        assert _until(lambda: me.bed.count("ops_pending") == 1)
    backend = dist.group.WORLD._get_backend(me.device)
    before = me.bed.count("aborts")
    with me.bed.knobs(**me.config["knobs"]):
        began = time.monotonic()
        thread = threading.Thread(target=me.attempt, args=("aborted", backend.abort), daemon=True)
        thread.start()
        _until(lambda: me.bed.count("ops_pending") == 0)
        ended, hangs = time.monotonic(), thread.is_alive()
        if not me.config.get("release"):  # else the hang ends with its knob
            thread.join(_LONG)
    thread.join(_LONG)
    del work
    me.event("seen", ms=(ended - began) * 1000, hangs=hangs, aborts=me.bed.count("aborts") - before)


def enqueue(me: Rank) -> None:
    """Fail what is told, and look what passes. Nothing waits for the other rank: what passes may stay pending."""
    _group(me)
    other = 1 - me.rank
    calls = {
        "AllReduce": lambda: dist.all_reduce(_ones(me), async_op=True),
        "Broadcast": lambda: dist.broadcast(_ones(me), 0, async_op=True),
        "Reduce": lambda: dist.reduce(_ones(me), 0, async_op=True),
        "AllGather": lambda: dist.all_gather_into_tensor(
            torch.ones(8).to(me.device), _ones(me), async_op=True
        ),
        "ReduceScatter": lambda: dist.reduce_scatter_tensor(
            _ones(me), torch.ones(8).to(me.device), async_op=True
        ),
        "Send": lambda: dist.isend(_ones(me), other),
        "Recv": lambda: dist.irecv(_ones(me), other),
    }
    if me.config.get("pair"):  # the communicator of a pair is made at its first use
        dist.send(_ones(me), 1) if me.rank == 0 else dist.recv(_ones(me), 0)
    for name in me.config["calls"]:
        with me.bed.enqueue_fails(me.config.get("result", 6), kind=me.config["kind"]):
            me.attempt(name, calls[name])
        me.bed.abandon_group()  # torch may have left one open (that is defect D6); the next call is about itself


def nth(me: Rank) -> None:
    """The third enqueue from now on fails, and all that follow, until it is switched off."""
    _group(me)
    with me.bed.enqueue_fails(2, after=2):
        for n in range(4):
            me.attempt(f"call {n}", lambda: _reduce(me))
            me.bed.abandon_group()
    me.attempt("after", lambda: _reduce(me))


def group_end(me: Rank) -> None:
    """The end of a group fails: torch makes one around a send."""
    _group(me)
    dist.send(_ones(me), 1) if me.rank == 0 else dist.recv(_ones(me), 0)
    with me.bed.group_end_fails(5):
        call = dist.isend if me.rank == 0 else dist.irecv
        me.attempt("inside", lambda: call(_ones(me), 1 - me.rank))
    me.bed.abandon_group()
    me.attempt("after", lambda: _reduce(me))


def init(me: Rank) -> None:
    """Making a communicator fails, or takes long."""
    me.init(me.config["backend"], timeout=600)
    with me.bed.knobs(**me.config["knobs"]):
        me.attempt("inside", lambda: _reduce(me))
    me.attempt("made", lambda: me.bed.count("comms"))


def async_error(me: Rank) -> None:
    """A communicator reports an error; torch's watchdog then aborts it."""
    _group(me)
    before = me.bed.count("aborts")
    with me.bed.operations_hang():
        work = dist.all_reduce(_ones(me), async_op=True)
        with me.bed.async_error(3):
            seen = _until(lambda: me.bed.count("aborts") > before)
    del work
    # An abort is counted when it is called; what is pending ends in its course.
    me.event("seen", aborted=seen, ended=_until(lambda: me.bed.count("ops_pending") == 0))


def hang(me: Rank) -> None:
    """The second operation from now on hangs, and so does all that follows it, until the group is aborted."""
    _group(me)
    with me.bed.operations_hang(after=1):
        first = dist.all_reduce(_ones(me), async_op=True)
        second = dist.all_reduce(_ones(me), async_op=True)
        third = dist.all_reduce(_ones(me), async_op=True)
        assert _until(first.is_completed)
    me.event("seen", later=[_until(each.is_completed, 0.3) for each in (second, third)])
    dist.group.WORLD._get_backend(me.device).abort()
    me.event("pending", ended=_until(lambda: me.bed.count("ops_pending") == 0))


def death(me: Rank) -> None:
    """Rank 1 is killed while rank 0 waits: when is it noticed, and how?"""
    _group(me)
    before = me.bed.count("aborts")
    if me.rank == 1:
        me.event("ready")
        time.sleep(_LONG)
    work = dist.all_reduce(_ones(me), async_op=True)
    me.event("ready")
    me.hear("killed")
    noticed = _until(lambda: me.bed.count("aborts") > before, me.config["seconds"])
    del work
    me.event("seen", noticed=noticed)


def one_communicator(me: Rank) -> None:
    """A fault of one group's communicator does not concern another's."""
    _group(me)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    ids = []
    for group in groups:
        before = _traced()
        with me.bed.knobs(TRACE=1):
            _reduce(me, group)
        ids += [line.partition("ncclAllReduce(")[2].partition(")")[0] for line in _traced()[len(before) :]]
    with me.bed.knobs(COMM=ids[0]), me.bed.enqueue_fails():
        me.attempt("that one", lambda: dist.all_reduce(_ones(me), group=groups[0], async_op=True))
        me.bed.abandon_group()
        me.attempt("the other", lambda: _reduce(me, groups[1]))
    me.event("ids", ids=ids)


def _traced() -> list[str]:
    """What the double has traced of all_reduces, from this process's own output."""
    return [line for line in Path("/proc/self/fd/2").read_text().splitlines() if "ncclAllReduce(" in line]


def non_blocking(me: Rank) -> None:
    """A non-blocking communicator takes its time."""
    me.init(me.config["backend"], timeout=600, eager=True)
    began = time.monotonic()
    value = _reduce(me)
    me.event("seen", ms=(time.monotonic() - began) * 1000, value=value)


def machine(me: Rank) -> None:
    """What the machine has; and a call or two."""
    torch.cuda.set_device(me.device)
    _, total = torch.cuda.mem_get_info()
    me.event("seen", devices=torch.cuda.device_count(), megabytes=total >> 20)


def device_error(me: Rank) -> None:
    """A kernel that ends with an error: all that use the device later get it."""
    tensor = torch.ones(4).to(me.device)
    with me.bed.knobs(DEVICE_ERROR_FROM=1):
        me.attempt("launch", lambda: tensor.fill_(3) and None)
    me.attempt("synchronize", torch.cuda.synchronize)
    me.attempt("allocate", lambda: torch.empty(1 << 26, device=me.device) and None)
    me.attempt("copy", tensor.tolist)
    me.attempt("again", torch.cuda.synchronize)


def no_threads(me: Rank) -> None:
    """Python can start no thread; the double can, for a stream."""
    torch.cuda.set_device(me.device)
    with me.bed.knobs(NO_THREADS=1):
        me.attempt("refused", threading.Thread(target=int).start)
        me.attempt("own", lambda: torch.ones(2).to(me.device).tolist())
    me.attempt("allowed", threading.Thread(target=int).start)


def kernel(me: Rank) -> None:
    """A kernel that is not modelled."""
    tensor = torch.arange(4.0).to(me.device)
    me.attempt("kernel", lambda: (tensor * 3).cpu())  # noqa: PLW0108 -- the product is what is tried
    me.event("refused", count=me.bed.count("kernels_refused"))


def stub(me: Rank) -> None:
    """A function that the double does not model."""
    result = ctypes.CDLL(None).cudaGraphicsUnmapResources(0, None, None)
    me.event("stub", result=result, stubs=me.bed.stubs(), count=me.bed.count("stubs"))


def counters(me: Rank) -> None:
    """What two operations do to the counters."""
    _group(me)
    with me.bed.counting() as seen:
        _reduce(me)
        dist.broadcast(_ones(me), 0)
        torch.cuda.synchronize()
    _reduce(me)
    counted = {
        name: getattr(seen, name) for name in ("enqueues", "launches", "comms_made", "aborts", "stubs")
    }
    me.event("seen", info=me.bed.info, **counted)
