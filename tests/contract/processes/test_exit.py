"""A program that just returns from main ends at once with exit code 0, whatever its worlds are doing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kits import forkedkit

PROGRAM = """
import asyncio, contextlib, sys, threading, time
import multiworld as mw, torch
import torch.distributed as dist

rank, store, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if what == "half-joined":
    threading.Thread(target=lambda: mw.join("w1", rank, 3, store=store, timeout=60), daemon=True).start()
    time.sleep(1.0)
elif what in ("half-joined-thread", "half-joined-range"):  # not a daemon: the interpreter would wait for it
    given = (rank, 3) if what == "half-joined-thread" else (None, "3:4")
    threading.Thread(target=lambda: mw.join("w1", *given, store=store, timeout=60)).start()
    from multiworld.registry import registry
    while not (registry.joining() and registry._hooked):
        time.sleep(0.01)
elif what == "half-joined-async":
    async def main():
        asyncio.create_task(mw.join_async("w1", rank, 3, store=store, timeout=60))
        await asyncio.sleep(1.0)
    asyncio.run(main())
else:
    w = mw.join("w1", rank, 2, store=store, timeout=60, hang_timeout=30)
    with contextlib.suppress(mw.BrokenWorldException if (what, rank) == ("broken", 0) else ()):
        w.barrier()  # a member that dies right after it may take the others' with it
    if what == "blocked-thread":  # not a daemon: the interpreter would wait for it
        threading.Thread(target=lambda: w.recv(torch.ones(1), 1 - rank)).start()
        time.sleep(0.5)
    elif what == "broken" and rank == 1:
        import os
        os.kill(os.getpid(), 9)
    elif what == "broken":
        while w.state is mw.State.ACTIVE:
            time.sleep(0.01)
    elif what == "pending-task":
        async def main():
            asyncio.create_task(w.aio.recv(torch.ones(1), 1 - rank))
            await asyncio.sleep(0.3)
        asyncio.run(main())
    elif what == "pending-works":
        kept = []
        try:
            kept += [w.irecv(torch.ones(1), 1 - rank) for _ in range(3)]
            with w:
                kept.append(dist.all_reduce(torch.ones(1), async_op=True) if rank else None)
        except mw.BrokenWorldException as broken:
            assert broken.cause == "left", broken  # the other one was faster, and is gone
    elif what == "exception":
        raise SystemExit(0)
print("end", time.monotonic(), flush=True)
"""


@pytest.mark.parametrize(
    "what",
    [
        "active",
        "broken",
        "blocked-thread",
        "pending-task",
        "pending-works",
        "half-joined",
        "half-joined-thread",
        "half-joined-range",
        "half-joined-async",
    ],
)
def test_it_ends(cast, what):
    started = [forkedkit.program(PROGRAM, str(rank), cast.store, what) for rank in range(2)]

    def watch(process):
        out, err = process.communicate(timeout=120)
        return out, err, time.monotonic()

    watchers = ThreadPoolExecutor(2)
    outcomes = [watchers.submit(watch, process) for process in started]
    try:
        for rank, process in enumerate(started):
            out, err, ended = outcomes[rank].result(timeout=150)
            if what == "broken" and rank == 1:
                assert process.returncode == -9
                continue
            assert process.returncode == 0, err
            assert out.startswith("end "), (out, err)
            assert ended - float(out.split()[1]) < 15.0, "2 s is the contract, on an idle machine"
            # The others' operations raise when the first one leaves, which Python says of threads and tasks.
            assert what not in {"active", "broken", "pending-works"} or "Traceback" not in err, err
    finally:
        for process in started:
            process.kill()
            process.wait()
        watchers.shutdown()
