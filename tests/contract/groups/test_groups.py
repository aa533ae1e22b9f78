"""Process groups of worlds: built, used, aborted, closed, with nothing left."""

import gc
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from kits.contract.groupkit import SOON, Crew, blocked, run, settles, sockets, soon, threads, threads_left
from kits.contract.worldkit import free_port

from multiworld._c10d.gloo import backend as gloo
from multiworld._c10d.routing import router


def works(member):
    """The default group computes, inside `with` and by its object, and goes away."""
    before, alone = sockets(), threads()
    began = time.perf_counter()
    group = member.build("w")
    built = time.perf_counter() - began
    made = len(threads()) - len(alone), len(sockets() - before)
    member.meet("built")
    tensor = torch.full((4,), float(member.rank + 1))
    with router.selected(group.state):
        dist.all_reduce(tensor)
        rank, size = dist.get_rank(), dist.get_world_size()
        names = list(group.state.names())
    pg_tensor = torch.ones(2)
    group.pg.allreduce([pg_tensor]).wait()
    began = time.perf_counter()
    closed = group.close(soon())
    gone = time.perf_counter() - began
    return {
        "sum": tensor.tolist(), "pg": pg_tensor.tolist(), "rank": rank, "size": size, "names": names,
        "closed": closed, "sockets": settles(lambda: sockets() == before), "threads": settles(lambda: threads_left() == alone),
        "left": [len(m) for m in (c10d._pg_map, c10d._pg_names, c10d._pg_group_ranks, c10d._pg_backend_config)],
        "default": dist.is_initialized(), "pg_is": group.pg, "built_ms": built * 1e3, "made": made, "close_ms": gone * 1e3,
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_works_and_leaves_nothing(size):
    for rank, seen in enumerate(run(size, works)):
        total = float(sum(range(1, size + 1)))
        assert (seen["sum"], seen["pg"]) == ([total] * 4, [float(size)] * 2)
        assert (seen["rank"], seen["size"], seen["default"], seen["pg_is"]) == (rank, size, False, None)
        assert seen["names"] == ["m8d:w:1:0"]
        assert seen["closed"]
        assert seen["sockets"]
        assert seen["threads"]
        assert seen["left"] == [0, 0, 0, 0]


def subgroups(member):
    before, alone = sockets(), threads()
    group = member.build("w")
    router.enter(group.state)
    pair = dist.new_group([0, 1])
    other = dist.new_group(list(range(member.size)))
    is_ours = [isinstance(other._get_backend(torch.device("cpu")), c10d.ProcessGroupGloo)]
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=other)
    if member.rank < 2:
        dist.all_reduce(tensor, group=pair)
    known = len(gloo.of(group.state).groups())
    # A sub-group that user code destroys goes away by itself.
    with_all = len(sockets() - before)
    dist.destroy_process_group(other)
    del other
    gc.collect()
    freed = settles(lambda: len(sockets() - before) < with_all)
    member.meet("subs")
    # An operation that is pending on a sub-group ends with the abort.
    pending = []
    if member.rank == 0:
        waiting = blocked(lambda: pair.recv([torch.ones(1)], 1, 0).wait())
        time.sleep(0.2)
        at = time.monotonic()
        group.abort()
        pending = waiting()
        pending = [(kind, text, when - at) for kind, text, when in pending]
    router.leave()
    pair = None
    closed = group.close(soon())
    return {
        "value": tensor.item(), "ours": is_ours, "known": known, "freed": freed, "pending": pending, "closed": closed,
        "sockets": settles(lambda: sockets() == before), "threads": settles(lambda: threads_left() == alone),
    }  # fmt: skip


def test_sub_groups_of_user_code_belong_to_the_world():
    results = run(3, subgroups)
    for rank, seen in enumerate(results):
        assert seen["value"] == (6.0 if rank < 2 else 3.0)
        assert seen["ours"] == [True]
        assert seen["known"] == (3 if rank < 2 else 2)
        assert seen["freed"]
        assert seen["closed"]
        assert seen["sockets"]
        assert seen["threads"]
    ((kind, text, after),) = results[0]["pending"]
    assert kind != "returned", text
    assert after < SOON


def many(member, count, seed):
    """Worlds in several threads, in another order on each member."""
    alone, before = threads(), sockets()
    names = [f"w{n}" for n in range(count)]
    random.Random(seed * 100 + member.rank).shuffle(names)  # noqa: S311  (an order, no secret)
    made, errors = {}, []

    def make(name):
        try:
            made[name] = member.build(name)
        except BaseException as error:  # noqa: BLE001  (reported)
            errors.append(repr(error))

    workers = [threading.Thread(target=make, args=(name,)) for name in names]
    for worker in workers:
        worker.start()
        time.sleep(random.random() * 0.01)  # noqa: S311  (a pause, no secret)
    for worker in workers:
        worker.join(90)
    values = {}
    for name in sorted(made):
        tensor = torch.tensor([float(int(name[1:]) * 10 + member.rank)])
        with router.selected(made[name].state):
            dist.all_reduce(tensor)
        values[name] = tensor.item()
    member.meet("used")
    closed = [group.close(soon()) for group in made.values()]
    made.clear()
    return {
        "errors": errors, "values": values, "closed": closed,
        "gone": settles(lambda: sockets() == before and threads_left() == alone),
    }  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_worlds_built_at_once_in_different_orders(seed):
    for seen in run(3, many, 4, seed):
        assert seen["errors"] == []
        assert seen["values"] == {f"w{n}": n * 30.0 + 3 for n in range(4)}
        assert seen["closed"] == [True] * 4
        assert seen["gone"]


def beside(member, port):
    """torch's own default group and two worlds: the abort of one leaves the rest alone."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=member.rank, world_size=member.size
    )
    first, second = member.build("first"), member.build("second")
    member.meet("built")
    own = blocked(lambda: dist.all_reduce(torch.ones(1)) if member.rank else time.sleep(0.6))
    if member.rank == 0:
        waiting = blocked(lambda: first.pg.recv([torch.ones(1)], 1, 0).wait())
        time.sleep(0.2)
        first.abort()
        ended = waiting()[0][0]
        second_pending = torch.ones(1)
        second.pg.allreduce([second_pending]).wait()
        time.sleep(0.3)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
    else:
        second_pending = torch.ones(1)
        second.pg.allreduce([second_pending]).wait()
        ended = blocked(lambda: first.pg.allreduce([torch.ones(1)]).wait())()[0][0]
    mine = own()[0][0]
    more = torch.ones(1)
    dist.all_reduce(more)
    closed = first.close(soon()), second.close(soon())
    after = torch.ones(1)
    dist.all_reduce(after)
    dist.destroy_process_group()
    return {
        "ended": ended,
        "second": second_pending.item(),
        "own": mine,
        "after": after.item(),
        "closed": closed,
    }


def test_an_abort_touches_nothing_else():
    for seen in run(2, beside, free_port()):
        assert seen["ended"] != "returned"
        assert seen["second"] == 2.0
        assert seen["own"] == "returned"
        assert seen["after"] == 2.0
        assert seen["closed"] == (True, True)


def from_anyone(member):
    """Receives from any source: gloo itself keeps them until their timeout, whatever becomes of the sockets."""
    before = sockets()
    group = member.build("w", timeout=5.0)
    router.enter(group.state)
    tensor = torch.zeros(1)
    if member.rank == 0:
        source = dist.recv(tensor)
        work = dist.irecv(tensor)
        work.wait()
        second = work.source_rank()
        del work  # it would keep gloo's listener, as every work does
    else:
        for value in (5.0, 6.0):
            dist.send(torch.tensor([value]), 0)
        source = second = 1
    member.meet("received")
    waiting = blocked(lambda: group.pg.recv_anysource([torch.ones(1)], 9).wait())
    time.sleep(0.2)
    at = time.monotonic()
    group.abort()
    ((kind, text, when),) = waiting()
    router.leave()
    group.close(soon(1))
    return {
        "value": tensor.item(), "source": (source, second), "kind": kind, "text": text, "after": when - at,
        "freed": settles(lambda: sockets() == before),
    }  # fmt: skip


def test_receives_from_any_source():
    for rank, seen in enumerate(run(2, from_anyone)):
        assert seen["source"] == (1, 1)
        assert seen["value"] == (0.0 if rank else 6.0)
        assert seen["kind"] == "RuntimeError"
        assert "aborted" in seen["text"]
        assert seen["after"] < 4.0, "it waited for the timeout"
        assert seen["freed"]


def everything_pending(member):
    group = member.build("w", timeout=60.0)
    one, two = torch.ones(3), [torch.ones(3) for _ in range(member.size)]
    pg = group.pg
    member.meet("built")
    if member.rank == 0:  # the victim takes part in nothing
        member.say("ready")
        member.ask()
        return []
    calls = {
        "send": lambda: [pg.send([torch.ones(4_000_000)], 0, 1).wait() for _ in range(20)],
        "recv": lambda: pg.recv([one.clone()], 0, 2).wait(),
        "all_reduce": lambda: pg.allreduce([one.clone()]).wait(),
        "broadcast": lambda: pg.broadcast(one.clone(), 0).wait(),
        "all_gather": lambda: pg.allgather([two], [one.clone()]).wait(),
        "barrier": lambda: pg.barrier().wait(),
        "from_a_survivor": lambda: pg.recv([one.clone()], 1 + member.rank % (member.size - 1), 4).wait(),
    }
    if member.size == 2:
        del calls["from_a_survivor"]
    waiting = blocked(*calls.values())
    time.sleep(0.5)
    member.say("ready")
    killed = member.ask()
    if killed:
        # One member whose peer died aborts; so does the watchdog in the others.
        time.sleep(0.05)
    at = time.monotonic()
    group.abort()
    took = time.monotonic() - at
    ended = [(name, kind, text, when - at) for name, (kind, text, when) in zip(calls, waiting(), strict=True)]
    began = time.monotonic()
    later = blocked(lambda: pg.allreduce([one]).wait(), lambda: pg.send([one], 0, 0).wait())()
    later_took = time.monotonic() - began
    pg = calls = waiting = None
    return {
        "took": took,
        "ended": ended,
        "later": later,
        "later_took": later_took,
        "closed": group.close(soon()),
    }


@pytest.mark.parametrize("how", ["kill", "stop", "none"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_pending_operation_raises(how, size):
    with Crew(size, everything_pending) as crew:
        for rank in range(size):
            crew.hear(rank)
        if how != "none":
            os.kill(crew.pid(0), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        for rank in range(1, size):
            crew.tell(rank, how == "kill")
        for rank in range(1, size):
            seen = crew.hear(rank)
            assert seen["took"] < SOON
            for name, kind, text, after in seen["ended"]:
                assert kind == "RuntimeError", (name, kind, text)
                assert after < SOON, (name, after)
            assert all(kind != "returned" for kind, _, _ in seen["later"])
            assert seen["later_took"] < SOON
            assert seen["closed"]
