"""A hub in many worlds while members die and hang at random: no healthy world notices, nothing is left at the end.

``--soak SECONDS`` makes it long (nox -s soak: 300 s, 30 worlds); by default it takes a quarter of a minute.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from pathlib import Path

import pytest
import torch
from kits.contract.worldkit import HANG, PATIENCE, left_over

import multiworld as mw

pytestmark = pytest.mark.everyday

LEAD = 0.02  # seconds between two messages of a spoke: traffic on all, and time for the two cores to serve it


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def hub(me, worlds, timeout, hang):
    async def serve(index, stop, tally):
        w = await mw.join_async(f"w{index}", 0, 2, store=me.store, timeout=timeout, hang_timeout=hang)
        while not stop.is_set():
            try:
                expected = 0
                message = torch.zeros(4, dtype=torch.int64)
                while not stop.is_set():
                    await w.aio.recv(message, 1)
                    got = message.tolist()
                    # who, which life, which message: a lost, doubled or foreign message shows
                    assert got[:3] == [index, w.generation, expected], (got, index, w.generation, expected)
                    await w.aio.send(message + 1, 1)
                    expected += 1
                    tally[index] += 1
            except mw.BrokenWorldException as broken:  # noqa: PERF203  (each life of a world ends so)
                if stop.is_set():
                    break
                me.emit(
                    "broke", index=index, cause=broken.cause, ranks=broken.ranks, generation=broken.generation
                )
                await w.rejoin_async()
                me.emit("back", index=index, generation=w.generation)
        w.close()

    async def main():
        stop, tally = asyncio.Event(), [0] * worlds
        tasks = [asyncio.create_task(serve(index, stop, tally)) for index in range(worlds)]
        loop = asyncio.get_running_loop()
        while len(mw.worlds()) < worlds:
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done():
                    task.result()
        began = left_over()
        me.emit("up", memory=memory(), **began)
        heard = loop.run_in_executor(None, me.hear, 900)
        done, _ = await asyncio.wait([heard, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {heard}:
            task.result()
            raise AssertionError("a task of a healthy world ended")
        end = loop.time() + PATIENCE / 2
        while loop.time() < end and grown(began, left_over()):  # noqa: ASYNC110  (nobody would set it)
            await asyncio.sleep(0.1)  # what the last breakages held may still be closing
        me.emit("tally", tally=tally, memory=memory(), **left_over())
        stop.set()
        for w in mw.worlds().values():
            w.close()
        await asyncio.wait(tasks, timeout=PATIENCE)

    before = left_over()
    asyncio.run(main())
    gc.collect()
    deadline = time.monotonic() + PATIENCE / 2
    while left_over()["fds"] > before["fds"] and time.monotonic() < deadline:
        time.sleep(0.1)  # the executor's thread and what closes in the background
    me.emit("after", before=before, after=left_over(), worlds=list(mw.worlds()))


def spoke(me, index, timeout, hang):
    # gloo loses a send that it tries to write when the other end has gone already, which is what a process that was
    # stopped does when it goes on: that one call ends at the operation's timeout.
    timeout = min(timeout, 10)
    name = f"w{index}"
    w = mw.join(name, 1, 2, store=me.store, timeout=timeout, hang_timeout=hang)
    while True:
        try:
            count = 0
            message, answer = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
            while True:
                message[0], message[1], message[2] = index, w.generation, count
                w.send(message, 0)
                w.recv(answer, 0)
                assert answer.tolist() == (message + 1).tolist()
                count += 1
                time.sleep(LEAD)
        except mw.BrokenWorldException as broken:  # noqa: PERF203  (each rejoin follows a breakage)
            if broken.cause == "left":
                return  # the hub ends the test
            try:
                w.rejoin()
            except mw.JoinError as error:
                if isinstance(error, (mw.StaleGenerationError, mw.RankTakenError)):
                    return  # it was stopped for so long that another has its place
                raise


def other_threads(seen) -> int:
    """Without the waiters: there are as many of them as operations are awaited at that moment, and a few idle ones."""
    return seen["tasks"] - sum(name.startswith("m8d-waiter") for name in seen["threads"])


def grown(before, after) -> bool:
    """Whether a process holds clearly more threads or descriptors than before."""
    return after["fds"] > before["fds"] + 8 or other_threads(after) > other_threads(before) + 6


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_faults_stay_where_they_happen(cast, soak_seconds):
    worlds, hang = (30 if soak_seconds > 60 else 10), HANG
    leader = cast.start(hub, 0, worlds=worlds, timeout=60, hang=hang)
    spokes = {index: cast.start(spoke, 1, index=index, timeout=60, hang=hang) for index in range(worlds)}
    up = leader.expect("up", timeout=120)
    dice = random.Random(7)  # noqa: S311  (the same faults every time)
    acts: dict[int, list[str]] = {index: [] for index in range(worlds)}
    end = time.monotonic() + soak_seconds
    while time.monotonic() < end:
        index = dice.randrange(worlds)
        act = dice.choice(["kill", "kill", "stop"])
        acts[index].append(act)
        if act == "kill":
            spokes[index].kill()
        else:
            spokes[index].stop()
        broke = leader.expect("broke")
        assert (broke.index, tuple(broke.ranks)) == (index, (1,)), (broke, act)
        assert broke.cause == ("crashed" if act == "kill" else "hung")
        if act == "kill":
            spokes[index] = cast.start(spoke, 1, index=index, timeout=60, hang=hang)
        else:
            spokes[index].go_on()
        back = leader.expect("back", timeout=60)
        assert (back.index, back.generation) == (index, len(acts[index]) + 1)
    leader.say("stop")
    tally = leader.expect("tally")
    assert all(count > 0 for count in tally.tally)
    healthy = [count for index, count in enumerate(tally.tally) if not acts[index]]
    assert not healthy or min(healthy) > soak_seconds  # at least one message a second, all the time
    # as many threads and descriptors as when it began: what broken generations held was given back
    assert not grown(up.data, tally.data), (up, tally)
    assert tally.memory - up.memory < (64 << 20), (up.memory, tally.memory)
    after = leader.expect("after", timeout=60)
    assert after.worlds == []
    assert after.after["fds"] <= after.before["fds"] + 2, after
    assert leader.finish() == 0
