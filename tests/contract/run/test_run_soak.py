"""A hub and its workers under ``m8d-run --restart worker``, one worker killed every two seconds.

``--soak SECONDS`` makes it long (`nox -s soak`: 300 s; 8 workers from 60 s on); by default it takes a quarter of a minute.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import statistics
import time

import pytest
from kits.contract.runkit import launched

pytestmark = [pytest.mark.everyday, pytest.mark.soak, pytest.mark.timeout(900)]

log = logging.getLogger("measured")

PATIENCE = 120.0
EVERY = 2.0  # seconds between two kills

FILE = """
[roles]
hub = 1
worker = {workers}

[worlds."w{{i}}"]
for = "worker"
members = ["hub:0", "worker:{{i}}"]
timeout = 60
hang_timeout = 30
"""

# Every world carries traffic all the time; who dies leaves only its own.
SCRIPT = """
import asyncio
import os
import torch, multiworld as mw

MORE = {"threads": 3, "files": 1}  # for each world: what comes and goes; nothing grows with the number of kills

def held():
    return {"threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd"))}

async def serve(w, stop, tally):
    news = torch.zeros(2)
    while True:
        last = stop.is_set()
        news.fill_(last)
        try:
            await w.aio.send(news, dst=1)
            await w.aio.recv(news, src=1)
            tally[w.name] += 1
            if last:
                return
            await asyncio.sleep(0.02)
        except mw.BrokenWorldException as broken:
            tell("broken", world=w.name, cause=str(broken.cause), generation=broken.generation)
            await asyncio.to_thread(w.wait_active, 110)

async def lead():
    worlds = await mw.join_all_async()
    first = held()
    tell("joined", took=0.0, worlds={w.name: w.generation for w in worlds.values()}, **first)
    stop, tally = asyncio.Event(), dict.fromkeys(worlds, 0)
    tasks = [asyncio.create_task(serve(w, stop, tally)) for w in worlds.values()]
    while not os.path.exists(os.environ["M8D_RUNKIT_TOLD"] + ".go"):
        await asyncio.sleep(0.05)
    for w in worlds.values():
        await asyncio.to_thread(w.wait_active, 110)
    most, until = {key: value + MORE[key] * len(worlds) for key, value in first.items()}, time.monotonic() + 60
    most["files"] += 1  # what this thread writes is counted in one
    while any(value > most[key] for key, value in held().items()) and time.monotonic() < until:
        await asyncio.sleep(0.1)  # a rejoin that has just ended may still be putting things away
    tell("held", most=most, **held())
    stop.set()
    await asyncio.gather(*tasks)
    tell("served", tally=tally, generations={w.name: w.generation for w in worlds.values()})

def follow():
    began = time.monotonic()
    (w,) = mw.join_all().values()
    tell("joined", took=time.monotonic() - began, worlds={w.name: w.generation})
    news = torch.zeros(2)
    while not news[0].item():
        w.recv(news, src=0)
        w.send(news, dst=0)

if os.environ["ROLE_NAME"] == "hub":
    asyncio.run(lead())
else:
    follow()
"""


def test_workers_die_all_the_time_and_nobody_else_notices(tmp_path, soak_seconds):
    workers = 8 if soak_seconds >= 60 else 3
    path = tmp_path / "worlds.toml"
    path.write_text(FILE.format(workers=workers))
    pick = random.Random(5)  # noqa: S311  (a test's dice)
    with launched(
        tmp_path, SCRIPT, options=["--worlds", str(path), "--max-restarts", "1000", "--log-format", "json"]
    ) as run:
        run.wait_told("joined", workers + 1, timeout=PATIENCE)
        (hub,) = run.told("joined", rank=0)
        kills = dict.fromkeys(range(1, workers + 1), 0)
        end = time.monotonic() + soak_seconds
        due = time.monotonic()
        enough, late = soak_seconds / EVERY / 3, end + PATIENCE
        while time.monotonic() < end or (sum(kills.values()) < enough and time.monotonic() < late):
            due = max(due + EVERY, time.monotonic())
            run.wait_for(lambda: time.monotonic() >= due, "the next kill", timeout=PATIENCE)  # noqa: B023
            # Who is on its way back is let be: its restart is what is timed.
            there = [rank for rank, count in kills.items() if len(run.told("joined", rank=rank)) > count]
            if there:
                rank = pick.choice(there)
                kills[rank] += 1
                os.kill(run.told("joined", rank=rank)[-1].pid, signal.SIGKILL)
        for rank, count in kills.items():
            run.wait_told("joined", count + 1, rank=rank, timeout=PATIENCE)
        run.say()
        (held,) = run.wait_told("held", timeout=PATIENCE)
        (served,) = run.wait_told("served", timeout=PATIENCE)
        assert run.ended(PATIENCE) == 0
        assert run.leftovers() == []

        assert len(run.told("joined", rank=0)) == 1, "the hub was restarted"
        for rank, count in kills.items():
            pids = [told.pid for told in run.told("joined", rank=rank)]
            assert len(pids) == len(set(pids)) == count + 1
            broken = run.told("broken", world=f"w{rank - 1}")
            assert {told.cause for told in broken} <= {"crashed"}
            assert len({told.generation for told in broken}) <= count, "a healthy world broke"
            assert (served.generations[f"w{rank - 1}"] > 1) == (count > 0)
        assert min(served.tally.values()) > 0
        assert sum(kills.values()) >= enough
        assert held.files <= held.most["files"]
        assert held.threads <= held.most["threads"]
        back = sorted(told.took for told in run.told("joined") if told.attempt > 0)
        log.info(
            "%d kills of %d workers: join_all to active, median %.0f ms, 9 of 10 in %.0f ms, maximum %.0f ms; "
            "the hub's descriptors %d -> %d, threads %d -> %d",
            sum(kills.values()), workers, 1e3 * statistics.median(back), 1e3 * back[int(0.9 * (len(back) - 1))],
            1e3 * back[-1], hub.files, held.files, hub.threads, held.threads,
        )  # fmt: skip
        # The contract's 0.5 s holds on a machine that has time for it; here it must not be another order.
        assert statistics.median(back) < 10
