"""A broken world frees what it holds by itself, and stays broken: a close is not needed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import deque
from pathlib import Path

import pytest
import torch
from kits.contract.elastickit import LONG, enter
from kits.contract.worldkit import PATIENCE, free_port, left_over

import multiworld as mw
from multiworld._c10d import waiter_pool
from multiworld._generation.generation import Generation

KILLED = 10
"""Of so many worlds one is broken by a kill, the others by a member that leaves."""

FEW = 10  # after which everything that worlds share is there


def until(what, timeout=PATIENCE):
    deadline = time.monotonic() + timeout
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def resident():
    """MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def alone_again(before):
    """Wait until this process holds no more than `before`; returns what it holds."""
    until(lambda: all(left_over()[each] <= before[each] for each in ("fds", "tasks")), 20)
    return left_over()


def at_rest(port):
    """What this process holds once it has been in a world, which it has left."""
    world = mw.join("first", 0, 1, store=f"tcp://127.0.0.1:{port}")
    world.barrier()
    assert world.close()
    tensor = torch.zeros(1 << 22) + 1  # torch's own threads
    assert tensor[0] == 1
    readings = deque(maxlen=10)  # a thread that Python has forgotten may not have ended yet

    def rests():
        readings.append(left_over())
        return list(readings) == 10 * [{**readings[0], "threads": ["MainThread"]}]

    assert until(rests)
    return readings[-1]


def idle_threads_end_soon():
    """Those that wait for works end when they were idle for five to ten seconds; here for half a second."""
    waiter_pool.pool._idle_seconds = waiter_pool.ending._idle_seconds = 0.5


def outlives(me, ports):
    idle_threads_end_soon()
    nothing = at_rest(free_port())
    held = []
    for i, port in enumerate(ports):
        if i == FEW:
            alone_again(nothing)
            held.append(resident())
        world = mw.join(f"w{i}", me.rank, 2, store=f"tcp://127.0.0.1:{port}", timeout=60)
        with pytest.raises(mw.BrokenWorldException):
            world.barrier()
            world.recv(torch.zeros(1000), 1 - me.rank)
    end = alone_again(nothing)
    held.append(resident())
    states = {world.state for world in mw.worlds().values()}
    causes = [world.breakage.cause.value for world in mw.worlds().values()]
    me.emit("flat", before=nothing, after=end, resident=held, states=states, causes=causes)


def leaves(me, ports, first=0):
    for i, port in enumerate(ports[first:], first):
        world = mw.join(f"w{i}", me.rank, 2, store=f"tcp://127.0.0.1:{port}", timeout=60)
        world.barrier()
        if i % KILLED == 0:
            me.emit("stays")
            me.hear()
        world.close()
    me.hear()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rank", "worlds"), [(0, 200), (1, 60)])
def test_dead_worlds_leave_nothing(cast, rank, worlds):
    ports = [free_port() for _ in range(worlds)]
    survivor = cast.start(outlives, rank, ports=ports)
    other = cast.start(leaves, 1 - rank, ports=ports)
    for killed in range(0, worlds, KILLED):
        other.expect("stays")
        other.kill()
        other = cast.start(leaves, 1 - rank, ports=ports, first=killed + 1)
    flat = survivor.expect("flat", timeout=6 * PATIENCE)
    assert flat.states == {mw.State.BROKEN}
    killed = worlds // KILLED
    assert [flat.causes.count(each) for each in ("crashed", "left")] == [killed, worlds - killed]
    assert flat.after["fds"] <= flat.before["fds"], flat.data
    assert flat.after["tasks"] <= flat.before["tasks"], flat.data
    assert flat.resident[1] - flat.resident[0] < 20, flat.data
    other.say("end")
    assert [each.finish() for each in (survivor, other)] == [0, 0]


def mourns(me, port):
    idle_threads_end_soon()
    nothing = at_rest(free_port())
    world = mw.join("w", me.rank, 2, store=f"tcp://127.0.0.1:{port}", timeout=60)
    told = []

    def waits(call):
        try:
            call()
        except mw.BrokenWorldException as broken:
            told.append(broken.cause)

    tensors = [torch.zeros(4), torch.zeros(1 << 22), torch.zeros(4)]

    def bare():
        with world:
            torch.distributed.irecv(tensors[0], 1 - me.rank, tag=7).wait()

    threads = [
        threading.Thread(target=waits, args=(call,))
        for call in (bare, lambda: world.all_reduce(tensors[1]), lambda: world.recv(tensors[2], 1 - me.rank))
    ]
    for thread in threads:
        thread.start()
    me.emit("waits")
    for thread in threads:
        thread.join(PATIENCE)
    threads.clear()
    me.emit("told", causes=told)
    me.emit("free", before=nothing, after=alone_again(nothing))
    # It is the same world still: it says why it broke, refuses, and comes back.
    with pytest.raises(mw.BrokenWorldException, match="pid"):
        world.barrier()
    me.emit("says", state=world.state, cause=world.breakage.cause, named=mw.worlds()["w"] is world)
    me.hear()
    world.rejoin(timeout=60)
    world.barrier()
    me.emit("back", generation=world.generation)
    me.hear()
    assert world.close()


def dies(me, port, generation=1):
    world = mw.join("w", me.rank, 2, store=f"tcp://127.0.0.1:{port}", timeout=60)
    me.emit("joined")
    if generation > 1:
        world.barrier()
    me.hear()


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_crash_with_operations_under_way_it_is_free_and_rejoins(cast, rank):
    port = free_port()
    survivor = cast.start(mourns, rank, port=port)
    other = cast.start(dies, 1 - rank, port=port)
    survivor.expect("waits")
    other.expect("joined")
    time.sleep(0.3)
    other.kill()
    assert survivor.expect("told").causes == ["crashed"] * 3
    free = survivor.expect("free")
    assert (free.after["fds"], free.after["tasks"]) == (free.before["fds"], free.before["tasks"]), free.data
    says = survivor.expect("says")
    assert (says.state, says.cause, says.named) == ("broken", "crashed", True)
    again = cast.start(dies, 1 - rank, port=port, generation=2)
    survivor.say("rejoin")
    assert survivor.expect("back").generation == 2
    again.say("end")
    survivor.say("end")
    assert [each.finish() for each in (survivor, again)] == [0, 0]


def serves(me, port):
    """Rank 0 of a world that breaks; others meet at its store too."""
    nothing = at_rest(free_port())
    world = mw.join("w", me.rank, 2, store=f"tcp://127.0.0.1:{port}", timeout=60)
    me.emit("joined")
    until(lambda: world.state is mw.State.BROKEN)
    me.hear()
    me.emit("free", before=nothing, after=alone_again(nothing))


def meets(me, port):
    world = mw.join("theirs", me.rank, 2, store=f"tcp://127.0.0.1:{port}", timeout=60)
    world.barrier()
    me.emit("joined")
    me.hear()
    with world:  # a new group meets at the store
        torch.distributed.barrier(group=torch.distributed.new_group([0, 1]))
    me.emit("grouped")
    me.hear()
    assert world.close()


def test_the_store_stays_while_others_are_connected_to_it(cast):
    port = free_port()
    server = cast.start(serves, 0, port=port)
    other = cast.start(dies, 1, port=port)
    other.expect("joined")
    strangers = [cast.start(meets, rank, port=port) for rank in (0, 1)]
    for each in strangers:
        each.expect("joined")
    other.kill()
    server.say("broke")
    time.sleep(3)  # longer than it takes to free a world, and to look for others
    for each in strangers:
        each.say("group")
    for each in strangers:
        each.expect("grouped")
        each.say("close")
    free = server.expect("free")
    assert (free.after["fds"], free.after["tasks"]) == (free.before["fds"], free.before["tasks"]), free.data
    assert [each.finish() for each in (*strangers, server)] == [0] * 3


def slow_gloo():
    """Give gloo's threads of this process what all others leave: they end an operation long after it has raised."""
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def keeps_a_model(me, port):
    from torch.nn.parallel import DistributedDataParallel

    world = mw.join("w", me.rank, 2, store=f"tcp://127.0.0.1:{port}", timeout=60)
    with world:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
    slow_gloo()
    me.emit("joined")
    until(lambda: world.state is mw.State.BROKEN)
    time.sleep(2.5)
    nothing = left_over()
    with world, pytest.raises(mw.BrokenWorldException):
        model(torch.ones(4)).sum().backward()
    del model  # a worker of its group may still have the tensors of the operation that failed
    me.emit("broken")
    until(lambda: left_over()["fds"] < nothing["fds"], 10)
    assert world.close()
    me.emit("free", before=nothing["fds"], after=left_over()["fds"])


def test_user_code_that_keeps_a_model_keeps_what_it_holds_and_no_more(cast):
    port = free_port()
    members = [cast.start(keeps_a_model, rank, port=port) for rank in (0, 1)]
    for each in members:
        each.expect("joined")
    members[1].kill()
    members[0].expect("broken")
    members[0].expect("free")
    assert members[0].finish() == 0


def past(w):
    """Return the generations before the present one that there still are."""
    gc.collect()
    return [
        each.number for each in gc.get_objects() if type(each) is Generation and each.number < w.generation
    ]


def stays(me):
    """Reforms three times, alone; then goes on while another member comes, leaves, and comes again."""
    w = enter(me, "1:2", last_call=0.0)
    for _ in range(3):
        w._gen.fail("a test", (w.rank,))
        w.reform(LONG)
    until(lambda: past(w) == [3], 10)  # they are released in the background
    me.emit("reformed", generation=w.generation, kept=past(w))
    entered = 0
    while entered < 3:
        w.barrier()
        entered += w.advance()
    until(lambda: past(w) == [3], 10)
    me.emit("advanced", generation=w.generation, kept=past(w))


def visits(me):
    w = enter(me, "1:2")
    w.leave()
    while w.state is not mw.State.CLOSED:
        w.barrier()
        w.advance()
    me.emit("left")


def test_a_generation_that_is_over_is_not_kept_by_the_next_one(cast):
    """The program's handle has the last one that broke."""
    member = cast.start(stays, 0)
    reformed = member.expect("reformed")
    cast.start(visits, 1).expect("left")
    cast.start(visits, 1)
    advanced = member.expect("advanced")
    assert (reformed.generation, reformed.kept) == (4, [3])
    assert (advanced.generation, advanced.kept) == (7, [3])
