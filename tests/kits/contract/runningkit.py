"""A member that runs one operation after the other until its world breaks, and says how that went."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist

import multiworld as mw
from kits.contract.worldkit import enter_netns

TIMEOUT = 60.0
"""Seconds, of each operation: a forgotten one ends then, which no stall of the machine can be taken for."""

KILOBYTE, MEGABYTE = 1 << 10, 1 << 20


def ring(send, recv, rank, size, tensor):
    """Pass `tensor` on, in a ring of an even number of members."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for even in (True, False):
        if (rank % 2 == 0) is even:
            send(tensor, after)
        else:
            recv(tensor, before)


def all_reduce(w, tensor):
    return lambda: w.all_reduce(tensor)


def routed_all_reduce(w, tensor):
    def step():
        with w:
            dist.all_reduce(tensor, async_op=True).wait()

    return step


def broadcast(w, tensor):
    return lambda: w.broadcast(tensor, 0)


def gather(w, tensor):
    parts = [torch.empty_like(tensor) for _ in range(w.world_size)] if w.rank == 0 else None
    return lambda: w.gather(tensor, parts, 0)


def objects(w, tensor):
    return lambda: w.all_gather_object([None] * w.world_size, tensor)


def send_recv(w, tensor):
    return lambda: ring(w.send, w.recv, w.rank, w.world_size, tensor)


def routed_send_recv(w, tensor):
    def step():
        with w:
            ring(dist.send, dist.recv, w.rank, w.world_size, tensor)

    return step


def posted_recv(w, tensor):
    def step():
        with w:
            ring(dist.send, lambda t, src: dist.irecv(t, src).wait(), w.rank, w.world_size, tensor)

    return step


def any_source(w, tensor):
    return (lambda: w.recv(tensor)) if w.rank == 0 else (lambda: w.send(tensor, 0))


def backward(w, tensor):
    """DDP, whose gradients torch waits for in C++."""
    layers = [torch.nn.Linear(256, 256) for _ in range(max(1, tensor.nbytes // (4 * 256 * 256)))]
    with w:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))

    def step():
        with w:
            model(torch.ones(4, 256)).sum().backward()

    return step


def hooked_backward(w, tensor):
    """DDP of a small model, whose hook has C++ wait for a message as long as `tensor`: most of its time that is half sent."""
    with w:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

    def hook(_, bucket):
        return dist.broadcast(tensor, 0, async_op=True).get_future().then(lambda _: bucket.buffer())

    model.register_comm_hook(None, hook)

    def step():
        with w:
            model(torch.ones(4, 4)).sum().backward()

    return step


LOOPS = {
    each.__name__: each
    for each in (
        all_reduce, routed_all_reduce, broadcast, gather, objects, send_recv, routed_send_recv, posted_recv, any_source,
        backward, hooked_backward,
    )
}  # fmt: skip


class Stalls:
    """How long a thread of this process waited for its turn, lately: what no program can promise less than."""

    def __init__(self):
        self._overslept = [(time.monotonic(), 0.0)]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            before = time.monotonic()
            time.sleep(0.002)
            now = time.monotonic()
            self._overslept = [*self._overslept[-500:], (now, now - before - 0.002)]

    def since(self, at):
        """All stalls since `at` together, seconds: the pool's, gloo's and the caller's thread wait in turn."""
        return sum(took for when, took in self._overslept if when >= at)


def runner(me, size, loop, nbytes, hang, netns=None, lane="1"):
    """Run the loop of one generation after the other, until the test says that it is enough."""
    if netns is not None:
        enter_netns(netns)
    os.environ["M8D_LANE"] = lane
    torch.set_num_threads(1)
    tensor = torch.ones(nbytes, dtype=torch.uint8) if nbytes < 4 else torch.ones(nbytes // 4)
    stalls = Stalls()
    w = mw.join("w", me.rank, size, store=me.store, timeout=TIMEOUT, hang_timeout=hang)
    while True:
        step = LOOPS[loop](w, tensor)
        me.emit("running", generation=w.generation)
        try:
            while True:
                step()
        except mw.BrokenWorldException as broken:
            late = time.monotonic() - w.breakage.at
            stalled = stalls.since(w.breakage.at)
            tensor.fill_(7)  # it is this program's again
            time.sleep(0.05)
            untouched = bool((tensor == 7).all())
            me.emit("raised", late=late, stalled=stalled, cause=broken.cause, untouched=untouched)
        del step
        if not me.hear(600):
            break
        w.rejoin(timeout=TIMEOUT)
    assert w.close(TIMEOUT / 4)
    me.emit("closed")
