"""NCCL worlds that cannot be made, and communicators that will not go: who is blocked, and for how long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from programs.worldkit import JOIN, PACE, broken, everything, full, held, joined, meet, same, until

if TYPE_CHECKING:
    from bed.rank import Rank

FOR_EVER = 600.0  # seconds


def aborts(me: Rank) -> None:
    """Aborting hangs, or fails: the caller, another thread's operations elsewhere, close, rejoin, the exit."""
    assert me.bed is not None
    other, world = joined(me, "other"), joined(me)
    wrong: list[Any] = []
    stop, slowest, rounds = threading.Event(), [0.0], [0]

    def beside() -> None:
        try:
            while True:
                began = time.monotonic()
                t, flag = full(me.rank + rounds[0], me.device), full(float(stop.is_set()), me.device, 1)
                other.all_reduce(t)
                other.all_reduce(flag)
                if not same(t, 1 + 2 * rounds[0]):
                    wrong.append([rounds[0], t.cpu().tolist()])
                slowest[0] = max(slowest[0], time.monotonic() - began)
                rounds[0] += 1
                if flag.cpu().item() == 2:
                    return
                time.sleep(PACE)
        except BaseException as exc:  # noqa: BLE001 -- told
            wrong.append([type(exc).__name__, str(exc)[:300]])

    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    way = me.config["fault"]

    # Until the end: whatever comes about here does so while the abort hangs.
    fault: Any = contextlib.nullcontext()
    if me.rank == 0:
        faults = {"fails": me.bed.abort_fails(3), "graphs": me.bed.knobs(GRAPHS_ALIVE=1)}
        fault = faults.get(way) or me.bed.abort_hangs(FOR_EVER, phase=way)
    with fault:
        if me.rank == 1:
            me.hear("lose", timeout=FOR_EVER)
            world.close()
            me.event("left")
        else:
            into = full(-7, me.device)
            me.event("ready")
            with broken(me, "broken"):
                world.recv(into, 1)
            began = time.monotonic()
            freed = world.close(timeout=30 if way == "fails" else 0.5)
            me.event("closed", freed=freed, ms=(time.monotonic() - began) * 1000)
        me.hear("again", timeout=FOR_EVER)
        began = time.monotonic()
        again = joined(me, "next")
        wrong += everything(again, me.device, ways=("method",))
        me.event("next", ms=(time.monotonic() - began) * 1000)
        stop.set()
        thread.join(60)
        me.event(
            "values", wrong=wrong, slowest_ms=slowest[0] * 1000, rounds=rounds[0], alive=thread.is_alive()
        )
        me.hear("end", timeout=FOR_EVER)


def makes(me: Rank) -> None:
    """Connecting fails or hangs on one member: each gets an exception, in time, and nothing is left; then it works."""
    assert me.bed is not None
    plain = joined(me, "plain", timeout=JOIN)  # whatever is made once
    began = {**held(), "comms": me.bed.count("comms")}
    faulty, fails = me.rank == me.config["faulty"], me.config["fault"] == "fails"
    fault = me.bed.init_fails(2) if fails else me.bed.init_hangs(FOR_EVER)
    with fault if faulty else contextlib.nullcontext():
        me.attempt("join", lambda: joined(me, "w", timeout=me.config["timeout"]) and None)
        if not fails:
            meet(me, "over")  # so long it hangs
    # Who waits for the one that failed waits inside ncclCommInitRank, which nobody can end: on a thread that the join
    # has left behind, for as long as NCCL does. Of all else nothing is left, when what hung has come to its end.
    stuck = int(fails and not faulty)
    # Early-close connections, and the line to this process's helper, come a moment after the first world.
    slack = {"python_threads": stuck, "fds": 6 + 5 * stuck, "comms": stuck}
    now: dict[str, int] = {}

    def settled() -> bool:
        now.update({**held(), "comms": me.bed.count("comms") if me.bed else 0})
        return all(now[key] <= began[key] + more for key, more in slack.items())

    me.event("left", nothing=until(settled), began=began, now=now)
    me.hear("again", timeout=FOR_EVER)
    again = joined(me, "w", timeout=JOIN)
    me.event(
        "values",
        wrong=everything(again, me.device, ways=("method",)) + everything(plain, me.device, ways=("bare",)),
    )
    meet(me, "done")


def subgroups(me: Rank) -> None:
    """Groups made inside a world: values; and a member that is lost while one is being made."""
    world = joined(me)
    wrong: list[Any] = []
    with world:
        pair = dist.new_group([0, 1])
        if me.rank < 2:
            t = full(me.rank + 1, me.device)
            dist.all_reduce(t, group=pair)
            wrong += [] if same(t, 3) else [["pair", t.cpu().tolist()]]
        t = full(me.rank + 1, me.device)
        dist.all_reduce(t)
        wrong += [] if same(t, 6) else [["all", t.cpu().tolist()]]
    me.event("ready", wrong=wrong)
    if me.rank == me.world_size - 1:
        me.hear("go", timeout=FOR_EVER)
        return
    with broken(me, "broken"), world:
        dist.new_group([0, 1, 2])
    world.close()


def lingers(me: Rank) -> None:
    """Be there for longer than every time torch's monitor has, after a member was lost; then go on."""
    other = joined(me, "other", world_size=2) if me.rank < 2 else None
    world = joined(me)
    with broken(me, "broken") if me.rank < 2 else contextlib.nullcontext():
        me.event("ready")
        while True:
            world.all_reduce(full(1, me.device))
    me.hear("go", timeout=FOR_EVER)
    me.event("values", wrong=everything(other, me.device, ways=("method",)) if other is not None else [])
    meet(me, "done", 2)


def stalls(me: Rank) -> None:
    """An operation never ends, or NCCL reports an error, and everybody lives: it raises; the world can be rejoined."""
    assert me.bed is not None
    other, world = joined(me, "other", timeout=JOIN), joined(me, timeout=me.config["timeout"])
    meet(me, "joined")
    fault = me.bed.operations_hang() if me.config["fault"] == "hangs" else me.bed.async_error(6)
    comms = me.bed.count("comms")
    with broken(me, "broken"), fault if me.rank == 0 else contextlib.nullcontext():
        if me.rank == 0 or me.config["fault"] == "hangs":
            world.all_reduce(full(1, me.device))
        else:
            world.recv(full(1, me.device), 0)
    wrong = everything(other, me.device, ways=("method",)) if me.config["fault"] == "hangs" else []
    if other.state.value == "active":
        world.rejoin(timeout=JOIN)
        wrong += everything(world, me.device, ways=("method",))
    me.event("values", wrong=wrong, other=other.state.value, comms=[comms, me.bed.count("comms")])
    meet(me, "done")


def traced(me: Rank) -> None:
    """End while torch's watchdog resolves the stack of a failed operation, or after: in a group of torch's own."""
    assert me.bed is not None
    assert joined(me, "w", timeout=JOIN)
    me.init("nccl")
    dist.all_reduce(full(1, me.device))
    with me.bed.operations_hang():
        work = dist.all_reduce(full(1, me.device), async_op=True)
    with me.bed.async_error():
        me.event("failing", work=repr(work))
        me.hear("go", timeout=FOR_EVER)
    me.event("loaded", compiler="torch._inductor" in sys.modules)
    dist.distributed_c10d._abort_process_group()  # it does not wait for what hangs
