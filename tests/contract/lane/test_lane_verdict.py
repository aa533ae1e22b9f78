"""From the verdict on a lost member to the exceptions of all calls, in the middle of messages of 1 KB to 1 GB."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import statistics
import threading
import time

import pytest
import torch
from kits.contract.runningkit import LOOPS, Stalls
from kits.contract.waykit import RECEIVES, SENDS, forbid_memory
from kits.contract.worldkit import HANG, PATIENCE, SOON, outcome

import multiworld as mw

log = logging.getLogger("measured")

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
TIMEOUT = 4 * PATIENCE
"""Seconds, of each operation: whatever ends before was ended by the verdict."""
BOUND = 0.05
"""Seconds from the verdict to the last call's exception."""
VICTIMS = 3
"""One stall of the machine makes one of them late; what the lane waits for makes all of them late."""

CALLS = {
    "receives": {
        "recv": RECEIVES["recv_method"],
        "recv of any": lambda w, t, _: w.recv(t),
        "awaited recv": lambda w, t, src: asyncio.run(w.aio.recv(t, src)),
        "block recv": RECEIVES["recv_block"],
        "posted recv": RECEIVES["recv_block_work"],
    },
    "sends": {
        "send": SENDS["method"],
        "awaited send": SENDS["awaited"],
        "block send": SENDS["block"],
        "posted send": SENDS["block_work"],
    },
}


def survivor(me, size, nbytes, what, memory, hang):
    """Lose one member after the other; all calls over one tensor, whose bytes are not compared."""
    torch.set_num_threads(1)
    if not memory:
        forbid_memory()
    room = torch.ones(nbytes, dtype=torch.uint8)
    stalls = Stalls()
    for number in range(VICTIMS):
        w = mw.join(f"w{number}", 0, size, store=me.store, timeout=TIMEOUT, hang_timeout=hang)
        ended = {}

        def run(name, call, w=w, ended=ended):
            def again():
                while True:
                    call(w, room, 1)

            kinds = outcome(again)["kinds"]
            ended[name] = kinds[:1], time.monotonic()

        threads = [threading.Thread(target=run, args=each, daemon=True) for each in CALLS[what].items()]
        w.barrier()
        for each in threads:
            each.start()
        me.emit("running")
        for each in threads:
            each.join(PATIENCE)
        at = w.breakage.at
        me.emit(
            "ended",
            late={name: when - at for name, (_, when) in ended.items()},
            kinds={name: kinds for name, (kinds, _) in ended.items()},
            cause=w.breakage.cause.value,
            stalled=stalls.since(at),
        )
        w.close()


def victim(me, size, nbytes, what, memory, hang, number):
    torch.set_num_threads(1)
    if not memory:
        forbid_memory()
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    w = mw.join(f"w{number}", 1, size, store=me.store, timeout=TIMEOUT, hang_timeout=hang)
    w.barrier()
    me.emit("running")
    me.emit("ended", **outcome(lambda: exchange(w, tensor, what)))
    w.close()


def exchange(w, tensor, what):
    while True:
        if what == "receives":
            w.send(tensor, 0)
        else:
            w.recv(tensor, 0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("fault", "nbytes", "what", "memory"),
    [
        ("kill", KB, "receives", True),
        ("kill", MB, "sends", True),
        ("kill", 256 * MB, "receives", False),
        ("kill", GB, "receives", True),
        ("kill", GB, "sends", False),
        ("stop", GB, "receives", True),
    ],
)
def test_every_call_raises_soon_after_the_verdict(cast, fault, nbytes, what, memory):
    arguments = {"size": 2, "nbytes": nbytes, "what": what, "memory": memory}
    arguments["hang"] = HANG if fault == "stop" else TIMEOUT
    one, late = cast.start(survivor, 0, **arguments), []
    for number in range(VICTIMS):
        lost = cast.start(victim, 1, number=number, **arguments)
        for each in (one, lost):
            each.expect("running")
        time.sleep(random.uniform(0.02, 0.3))  # noqa: S311  (somewhere in the middle)
        lost.kill() if fault == "kill" else lost.stop()
        seen = one.expect("ended", PATIENCE + HANG)
        assert seen.cause == {"kill": "crashed", "stop": "hung"}[fault]
        assert seen.kinds == {name: ["BrokenWorldException"] for name in CALLS[what]}
        times = sorted(seen.late.values())
        late.append(times[-1] - 2 * seen.stalled)
        assert times[-1] < SOON
        if fault == "stop":
            lost.go_on()
            assert lost.expect("ended").kinds[0] == "BrokenWorldException"
            assert lost.finish() == 0
    assert one.finish() == 0
    log.info("%s, %d bytes, %s: %s s", fault, nbytes, what, [f"{each:.4f}" for each in late])
    assert statistics.median(late) < BOUND, late


def waits_in_a_collective(me, loop, nbytes):
    """Lose one member after the other in a collective that it does not come to."""
    torch.set_num_threads(1)
    stalls = Stalls()
    for number in range(VICTIMS):
        w = mw.join(f"w{number}", 0, 2, store=me.store, timeout=TIMEOUT, hang_timeout=TIMEOUT)
        step = LOOPS[loop](w, torch.ones(nbytes // 4))
        me.emit("running")
        seen = outcome(step)
        at = w.breakage.at
        me.emit("ended", late=time.monotonic() - at, kinds=seen["kinds"][:1], stalled=stalls.since(at))
        w.close()


def stays_out_of_it(me, loop, nbytes, number):
    torch.set_num_threads(1)
    w = mw.join(f"w{number}", 1, 2, store=me.store, timeout=TIMEOUT, hang_timeout=TIMEOUT)
    step = LOOPS[loop](w, torch.ones(nbytes // 4))  # a model's parameters are compared as it is made
    me.emit("running")
    me.hear(TIMEOUT)
    del step


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("loop", "nbytes"), [("all_reduce", MB), ("broadcast", 64 * MB), ("backward", 16 * MB)]
)
def test_a_collective_raises_soon_after_the_verdict(cast, loop, nbytes):
    arguments = {"loop": loop, "nbytes": nbytes}
    one, late = cast.start(waits_in_a_collective, 0, **arguments), []
    for number in range(VICTIMS):
        lost = cast.start(stays_out_of_it, 1, number=number, **arguments)
        for each in (one, lost):
            each.expect("running")
        time.sleep(random.uniform(0.3, 0.6))  # noqa: S311  (it is in there)
        lost.kill()
        seen = one.expect("ended", PATIENCE)
        assert seen.kinds == ["BrokenWorldException"]
        assert seen.late < SOON
        late.append(seen.late - 2 * seen.stalled)
    assert one.finish() == 0
    log.info("%s, %d bytes: %s s", loop, nbytes, [f"{each:.4f}" for each in late])
    # Threads of DDP's and of gloo's have to get their turns one after the other there.
    assert statistics.median(late) < (4 * BOUND if loop == "backward" else BOUND), late


def told_late(me, size, lane):
    """Wait for a member that dies, while the watchdog, which has the verdict, has not told the world yet."""
    os.environ["M8D_LANE"] = lane
    w = mw.join("w", me.rank, size, store=me.store, timeout=TIMEOUT, hang_timeout=TIMEOUT)
    w.barrier()
    raised, attachment = threading.Event(), w._gen._attachment
    tell = attachment._on_verdict

    def hold(breakage):
        raised.wait(PATIENCE)
        tell(breakage)

    attachment._on_verdict = hold
    me.emit("waits")
    seen = outcome(lambda: w.recv(torch.ones(8), 1))
    raised.set()
    me.emit("ended", **seen, world=w.breakage.cause.value)
    w.close()


def waits_to_die(me, size, lane):
    os.environ["M8D_LANE"] = lane
    w = mw.join("w", me.rank, size, store=me.store, timeout=TIMEOUT, hang_timeout=TIMEOUT)
    w.barrier()
    me.emit("waits")
    me.hear(PATIENCE)


@pytest.mark.parametrize("lane", ["1", "0"], ids=["lane", "gloo"])
def test_the_verdict_stands_before_the_world_is_told_of_it(cast, lane):
    one, lost = (
        cast.start(told_late, 0, size=2, lane=lane),
        cast.start(waits_to_die, 1, size=2, lane=lane),
    )
    for each in (one, lost):
        each.expect("waits")
    lost.kill()
    seen = one.expect("ended")
    assert (seen.kinds[0], seen.cause, seen.world) == ("BrokenWorldException", "crashed", "crashed")
    assert one.finish() == 0
