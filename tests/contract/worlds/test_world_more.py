"""Worlds where several things happen at once: closing, breaking and rejoining in each other's way, and odd calls."""

from __future__ import annotations

import asyncio
import gc
import linecache
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.elastickit import answered
from kits.contract.programkit import alone, number, runs, tell_error, wait_for
from kits.contract.worldkit import PATIENCE, SOON, free_port
from kits.meetkit import until_claimed

import multiworld as mw
from multiworld import aio, metrics
from multiworld._c10d.gloo import listeners
from multiworld._c10d.routing import ended_groups, router
from multiworld._c10d.routing import state as routed_state
from multiworld._core.liveness import detector
from multiworld._generation.operations import GenerationOperations
from multiworld._generation.process_totals import process_totals
from multiworld.events import Breakage, Cause
from multiworld.metrics.recorder import recorder
from multiworld.registry import registry


def break_it(w, detail="a test says so"):
    w._gen.verdict(Breakage(Cause.FAILED, (), detail, time.monotonic()))


async def given_up(awaitable, seconds=0.1):
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(awaitable, seconds)


# -- receives nobody waits for any more -----------------------------------------------------------------------------


def parked(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)

    async def receives():
        first, second = (asyncio.create_task(w.aio.recv(number(), 0)) for _ in range(2))
        await asyncio.sleep(0.05)
        second.cancel()  # the later one first
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        await given_up(w.aio.recv(number(), 0))  # takes the first one over, and gives it up again
        w.barrier()
        t = number()
        got = []
        for how in ("recv", "aio", "irecv", "recv"):
            if how == "recv":
                assert w.recv(t, 0) == 0
            elif how == "aio":
                assert await w.aio.recv(t, 0) == 0
            else:
                assert w.irecv(t, 0).wait()
            got.append(t.item())
        assert got == [1, 2, 3, 4]

        await given_up(w.aio.recv(number()))  # from anybody
        w.barrier()
        assert await w.aio.recv(t) == 0
        await given_up(w.aio.recv(number()))
        w.barrier()
        assert w.recv(t) == 0

        await given_up(w.aio.recv(torch.zeros(2), 0))
        w.barrier()
        for receive in (w.recv, lambda *args: w.irecv(*args).wait()):
            with pytest.raises(mw.SizeMismatchError, match="sent 8 bytes, and the tensor to receive has 12"):
                receive(torch.zeros(3), 0)
        with pytest.raises(mw.SizeMismatchError, match="sent 8 bytes"):
            await w.aio.recv(torch.zeros(3), 0)
        t = torch.zeros(2, dtype=torch.int32)  # another type of the same size: a message is bytes
        w.recv(t, 0)
        assert t.tolist() == [1, 2]

    if me.rank == 1:
        asyncio.run(receives())
    else:
        w.barrier()
        for value in (1, 2, 3, 4):
            w.send(number(value), 1)
        w.barrier()
        w.send(number(5), 1)
        w.barrier()
        w.send(number(6), 1)
        w.barrier()
        for _ in range(4):
            w.send(torch.tensor([1, 2], dtype=torch.int32), 1)
    w.barrier()
    w.close()


def test_what_is_given_up_is_received_in_order_by_the_next(cast):
    runs(cast, parked, 2)


def waits(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=10)

    async def again():
        work = await w.aio.irecv(t := number(), 0)

        async def wait():
            await work

        await given_up(wait())
        w.barrier()
        await work
        await work.wait()
        assert t.item() == 8

    if me.rank == 1:
        work = w.irecv(t := number(), 0)
        assert work.wait()
        assert work.wait()  # gloo alone would wait for another message, and time out
        assert t.item() == 7
        asyncio.run(again())
    else:
        work = w.isend(number(7), 1)
        assert work.wait()
        assert work.wait()
        w.barrier()
        w.send(number(8), 1)
    w.barrier()
    w.close()


def test_a_work_may_be_waited_for_again(cast):
    runs(cast, waits, 2)


# -- what breaks a world, and what does not -------------------------------------------------------------------------


def strangers(me, size):
    w = alone(me)
    for error in (
        FileNotFoundError("settings.json"),
        TimeoutError("my queue"),
        ConnectionResetError("my database"),
        RuntimeError("connection refused by my database"),
        ValueError("mine"),
    ):
        with pytest.raises(type(error)) as caught, w:
            raise error
        assert caught.value is error
        assert w.state is mw.State.ACTIVE, error
    with pytest.raises(FileNotFoundError), w:
        torch.load("/nonexistent/model.pt")
    weight = torch.ones(1, requires_grad=True)

    def hook(_):
        raise TimeoutError("in a hook")

    weight.register_hook(hook)
    with pytest.raises(TimeoutError, match="in a hook"), w:
        weight.sum().backward()
    assert w.state is mw.State.ACTIVE
    break_it(w)
    with pytest.raises(ZeroDivisionError), w:
        _ = 1 / 0
    with pytest.raises(mw.BrokenWorldException), w:
        dist.all_reduce(number())
    w.close()


def test_errors_of_other_things_neither_break_a_world_nor_are_hidden(cast):
    runs(cast, strangers)


def rejoiner(me, size, then):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    w.barrier()
    if me.rank == 0:
        me.emit("ready")
        time.sleep(60)

    def on_break(world):
        if then == "rejoin":
            with pytest.raises(mw.JoinTimeoutError):
                world.rejoin(timeout=1)
        else:
            time.sleep(0.2)

    w.on_break(on_break)
    kinds = []

    def note(fn):
        try:
            fn()
        except Exception as exc:  # noqa: BLE001  (whatever it is)
            kinds.append(type(exc).__name__)

    def inside():
        with w:
            note(lambda: dist.recv(number(), 0))
            for _ in range(30):
                note(lambda: dist.all_reduce(number()))
                time.sleep(0.02)

    async def awaited():
        await w.aio.recv(number(), 0)

    targets = [
        inside,
        lambda: note(lambda: w.recv(number(), 0)),
        lambda: note(lambda: asyncio.run(awaited())),
    ]
    threads = [threading.Thread(target=target) for target in targets * 2]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    me.emit("ready")
    for thread in threads:
        thread.join()
    assert len(kinds) == 2 * (31 + 1 + 1)
    assert set(kinds) == {"BrokenWorldException"}, kinds
    assert wait_for(lambda: w.state is mw.State.BROKEN)
    w.close()


@pytest.mark.parametrize("then", ["rejoin", "nothing"])
def test_what_is_pending_says_broken_even_where_a_callback_rejoins_at_once(cast, then):
    victim, other = cast.all(rejoiner, 2, then=then)
    victim.expect("ready")
    other.expect("ready")
    victim.kill()
    assert other.finish() == 0


def told(me, size):
    w = alone(me)
    times = []
    stop = mw.subscribe(
        lambda event: isinstance(event, mw.WorldBroken) and w.on_break(lambda _: times.append("late"))
    )
    blocked = threading.Event()
    w.on_break(lambda _: blocked.wait(30))
    w.on_break(lambda _: times.append("early"))
    forget = w.on_break(times.append)
    w.on_break(times.append)
    forget()
    break_it(w)
    assert wait_for(lambda: len(times) >= 3)
    time.sleep(0.3)
    assert sorted(map(str, times)) == [str(w), "early", "late"]
    stop()
    blocked.set()
    w.on_break(lambda _: times.append("after"))
    assert wait_for(lambda: "after" in times)
    w.close()


def test_each_is_told_once_and_none_waits_for_another(cast):
    runs(cast, told)


def raising_subscriber(me, size, kind):
    def fails(event):
        if kind is asyncio.CancelledError or isinstance(event, mw.WorldBroken):
            raise kind("a subscriber")

    mw.subscribe(fails)
    w = alone(me)
    told = []
    w.on_break(told.append)
    try:
        break_it(w)
    except KeyboardInterrupt:  # a Ctrl-C is for the thread that it comes to
        assert kind is KeyboardInterrupt
    assert wait_for(lambda: told == [w])
    w.close()


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt])
def test_what_a_subscriber_raises_does_not_keep_on_break_from_being_told(cast, kind):
    runs(cast, raising_subscriber, kind=kind)


# -- closing and rejoining in each other's way ----------------------------------------------------------------------


def failed_works(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    works = [w.irecv(number(), 1 - me.rank)]
    if me.rank == 0:
        works.append(w.all_reduce(number(), async_op=True))  # which the other one never calls
        break_it(w)
    assert wait_for(lambda: w.breakage)
    for work in works:
        with pytest.raises(mw.BrokenWorldException):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), mw.BrokenWorldException)
        for name in ("wait", "synchronize", "result", "source_rank", "_source_rank"):
            with pytest.raises(mw.BrokenWorldException):
                getattr(work, name)()
        with pytest.raises(mw.BrokenWorldException):
            work.get_future().wait()
        assert not hasattr(work, "no_such_method")
    w.close()


def test_a_work_that_failed_raises_the_worlds_error_whatever_it_is_asked(cast):
    runs(cast, failed_works, 2)


def closed_late(me, size):
    closed = []
    mw.subscribe(lambda event: closed.append(event.generation) if isinstance(event, mw.WorldClosed) else None)
    old = alone(me)
    break_it(old)
    new = alone(me)
    assert old.close()
    assert new.state is mw.State.ACTIVE
    assert closed == [], "those who go by the name would take the new world for closed"
    new.close()
    assert closed == [new.generation]
    old.close()
    assert closed == [new.generation]


def test_an_old_handle_that_is_closed_late_is_not_told_as_the_end_of_the_new_world(cast):
    runs(cast, closed_late)


def failed_rejoin(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    events = []
    stop = mw.subscribe(lambda event: events.append(type(event).__name__))
    w.barrier()
    me.emit("ready")
    if me.rank == 1:
        time.sleep(60)
    assert wait_for(lambda: w.state is mw.State.BROKEN)
    with pytest.raises(mw.JoinTimeoutError):
        answered(lambda: w.rejoin(timeout=0.5))
    assert w.state is mw.State.BROKEN
    assert mw.worlds() == {"w1": w}
    with pytest.raises(mw.BrokenWorldException):
        w.barrier()

    outcome = []

    def rejoin():
        try:
            outcome.append(w.rejoin(timeout=60))
        except mw.JoinAbandonedError as exc:
            outcome.append(exc)

    thread = threading.Thread(target=rejoin)
    thread.start()
    assert wait_for(lambda: w.state is mw.State.JOINING)
    time.sleep(0.3)
    began = time.monotonic()
    assert w.close()
    thread.join(60)
    assert isinstance(outcome[0], mw.JoinAbandonedError)
    assert time.monotonic() - began < SOON
    assert (w.state, mw.worlds()) == (mw.State.CLOSED, {})
    with pytest.raises(mw.WorldClosedError):
        w.barrier()
    w.close()
    stop()
    failed = ["WorldJoining", "WorldJoinFailed"]
    assert sorted(events) == sorted(["WorldBroken", *failed, *failed, "WorldClosed"])


def test_a_rejoin_that_fails_or_is_closed_leaves_the_world_as_it_was(cast):
    other, victim = cast.all(failed_rejoin, 2)
    other.expect("ready")
    victim.expect("ready")
    victim.kill()
    assert other.finish() == 0


def waits_for_its_store(me, size, where):
    from multiworld._net.stores import store as stores

    w = mw.join("w1", me.rank, size, store=where, timeout=60)
    me.emit("ready")
    if me.rank == 0:
        time.sleep(60)
    assert wait_for(lambda: w.state is mw.State.BROKEN)
    looked, connect_as = threading.Event(), stores.TcpClient.connect_as

    def connect(*arguments, **more):
        try:
            return connect_as(*arguments, **more)
        except OSError:
            looked.set()
            raise

    stores.TcpClient.connect_as = connect
    raised = []

    def rejoin():
        try:
            w.rejoin(timeout=PATIENCE)
        except mw.JoinError as error:
            raised.append(error)

    thread = threading.Thread(target=rejoin)
    thread.start()
    # While rank 0 ends, its server may take a connection that it drops.
    assert looked.wait(PATIENCE)
    w.close()
    thread.join(PATIENCE)
    assert [type(error) for error in raised] == [mw.JoinAbandonedError]


def test_a_rejoin_that_is_closed_while_it_waits_for_its_store_says_so(cast):
    victim, other = cast.all(waits_for_its_store, 2, where=f"tcp://127.0.0.1:{free_port()}")
    other.expect("ready")
    victim.kill()
    assert other.finish() == 0


def stale(me, size):
    first = mw.join("w1", 0, 1, store=me.store, timeout=30)
    break_it(first)
    second = mw.join("w1", 0, 1, store=me.store, timeout=30)
    assert first.state is mw.State.BROKEN
    for _ in range(2):  # while the other one is active, and when it is broken
        with pytest.raises(mw.StaleGenerationError, match="generation 2"):
            first.rejoin()
        break_it(second)
    assert mw.worlds() == {"w1": second}
    first.close()
    assert mw.worlds() == {"w1": second}
    assert second.rejoin() is second
    assert second.generation == 3
    second.close()
    assert first.rejoin().generation == 4  # nobody holds the name any more
    first.close()
    assert mw.worlds() == {}


def test_an_old_handle_does_not_take_the_name_from_a_new_one(cast):
    runs(cast, stale)


def crowded(me, size):
    events = []
    stop = mw.subscribe(lambda event: events.append(type(event).__name__))
    w = alone(me)
    gate = threading.Barrier(8)

    def close():
        gate.wait()
        assert w.close()

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events == ["WorldJoining", "WorldActive", "WorldClosed"]

    # Broken before anybody heard that it is active, and closed by who hears of that: told in order, and not listed.
    events.clear()
    closer = mw.subscribe(
        lambda event: isinstance(event, mw.WorldActive) and break_it(mw.worlds()[event.world])
    )
    w = alone(me)
    assert w.state is mw.State.BROKEN
    assert events == ["WorldJoining", "WorldActive", "WorldBroken"]
    closer()
    w.close()
    stop()
    with pytest.raises(mw.WorldClosedError):
        _ = w.group
    usual = os.environ["M8D_CLOSE_TIMEOUT"]
    os.environ["M8D_CLOSE_TIMEOUT"] = "soon"
    try:
        assert w.close()
    finally:
        os.environ["M8D_CLOSE_TIMEOUT"] = usual


def test_closing_is_told_once_and_in_order(cast):
    runs(cast, crowded)


def held(me, size):
    os.environ["M8D_LANE"] = (
        "p2p"  # gloo's group is held by the work; of a collective over the lane nothing is
    )
    w = mw.join("w1", me.rank, size, store=me.store, timeout=6)
    if me.rank == 0:
        w.barrier()
        work = w.all_reduce(number(), async_op=True)  # the other never makes the call
        w.send(number(), 1)  # but closes after it was made
        assert not w.close(2)
        assert w.state is mw.State.CLOSED
        del work
        gc.collect()
        assert wait_for(w.close)  # asked again, it says how it is now
    else:
        w.barrier()
        w.recv(number(), 0)
        w.close()


def test_a_close_that_ran_out_of_time_may_be_asked_again(cast):
    runs(cast, held, 2)


def pending(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=30)
    w.barrier()

    async def closing():
        tasks = [
            asyncio.create_task(operation)
            for operation in (w.aio.recv(number(), 1), w.aio.recv(number()), w.aio.all_reduce(number()))
        ]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(w.close)
        began = time.monotonic()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end).__name__ for end in ends] == ["WorldClosedError"] * 3
        assert time.monotonic() - began < SOON

    if me.rank == 0:
        asyncio.run(closing())
    else:
        tell_error(me, lambda: w.recv(number(), 0))
        w.close()


def test_a_close_ends_what_is_awaited(cast):
    runs(cast, pending, 2)


def parent(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    w.barrier()
    # Its own message and collective are for the parent alone, also where the child waits first.
    room, total = number(), number(1)
    receive, reduce = w.irecv(room, 1 - me.rank), w.all_reduce(total, async_op=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for work in (receive, reduce):
                with pytest.raises(mw.WorldClosedError, match="forked"):
                    work.wait()
            with pytest.raises(mw.WorldClosedError, match="forked"):
                w.all_reduce(number())
            with pytest.raises(mw.WorldClosedError, match="forked"), w:
                dist.all_reduce(number())
            assert mw.worlds() == {}
            assert w.close()
            code = 0
        finally:
            os._exit(code)
    ended = []
    assert wait_for(
        lambda: ended or ended.extend([p for p in [os.waitpid(pid, os.WNOHANG)] if p[0]]) or ended
    )
    assert ended == [(pid, 0)]
    w.send(number(7), 1 - me.rank)
    receive.wait()
    assert room.item() == 7
    reduce.wait()
    assert total.item() == size
    t = number(1)
    w.all_reduce(t)
    assert t.item() == size
    w.barrier()
    w.close()


def test_a_forked_child_has_nothing_of_its_parents_worlds(cast):
    runs(cast, parent, 2)


def awaiting_parent(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    if me.rank:
        me.hear(PATIENCE)
        w.send_object_list(["x"], 0)
        w.close()
        return
    loop, objects = asyncio.new_event_loop(), [None]
    awaited = loop.create_task(w.aio.recv_object_list(objects, 1))
    loop.run_until_complete(asyncio.sleep(0))  # it has its turn, which never ends in the child
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(mw.WorldClosedError, match="forked"):
                asyncio.run(asyncio.wait_for(w.aio.recv(number(), 1), SOON))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0) == (pid, 0)
    me.emit("forked")
    assert loop.run_until_complete(asyncio.wait_for(awaited, PATIENCE)) == 1
    assert objects == ["x"]
    loop.close()
    w.close()


def test_a_forked_child_awaits_nothing_that_its_parent_does(cast):
    one, other = cast.all(awaiting_parent, 2)
    one.expect("forked")
    other.say("go")
    assert [one.finish(), other.finish()] == [0, 0]


def counted_by_another_thread(me, size):
    w = alone(me)
    held, forked = threading.Event(), threading.Event()

    def count():
        with process_totals._lock:  # as `sums` does, which the metrics ask for
            held.set()
            forked.wait()

    counting = threading.Thread(target=count)
    counting.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    forked.set()
    counting.join()
    ended = []
    try:
        assert wait_for(
            lambda: ended or ended.extend([p for p in [os.waitpid(pid, os.WNOHANG)] if p[0]]) or ended
        )
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise
    assert ended == [(pid, 0)]
    w.close()


def test_a_fork_returns_in_the_child_while_another_thread_reads_the_totals(cast):
    runs(cast, counted_by_another_thread)


def forks_while_another_thread_routes(me, size):
    """Each lock of the router's is held at the fork; the router's own is waited for."""
    w, forking = alone(me), threading.Event()
    os.register_at_fork(before=forking.set)  # it is called before the router's
    for module in (router, routed_state, ended_groups, listeners):
        held, over = threading.Event(), threading.Event()

        def hold(module=module, held=held, until=forking if module is router else over):
            with module._lock:
                held.set()
                until.wait()

        holding = threading.Thread(target=hold)
        holding.start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE))
            code = 1
            try:
                child = mw.join("child", 0, 1, store=dist.HashStore(), timeout=PATIENCE)
                with child:
                    dist.new_group([0])
                assert child.close()
                code = 0
            finally:
                os._exit(code)
        over.set()
        holding.join()
        assert os.waitpid(pid, 0) == (pid, 0), module.__name__
    w.close()


def test_a_forked_child_joins_though_another_thread_of_its_parent_was_joining(cast):
    runs(cast, forks_while_another_thread_routes)


def rejoins_while_the_verdict_is_told(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    told, later = [], GenerationOperations.report_later
    mw.events.subscribe(lambda event: told.append(type(event).__name__))
    GenerationOperations.report_later = lambda self, breakage: (time.sleep(0.5), later(self, breakage))
    me.emit("in")
    me.hear()
    with pytest.raises(mw.BrokenWorldException):
        w.recv(number(), 1)
    with pytest.raises(mw.JoinError):
        w.rejoin(timeout=1)
    me.emit("told", events=[each for each in told if each in {"WorldBroken", "WorldJoining"}])


def test_a_breakage_is_told_before_the_join_that_mends_it(cast):
    one, other = cast.all(rejoins_while_the_verdict_is_told, 2)
    for each in (one, other):
        each.expect("in")
    one.say("go")
    other.kill()
    assert one.expect("told").events == ["WorldBroken", "WorldJoining"]
    assert one.finish() == 0


def two_threads_ask(me, size):
    w = alone(me)
    others, init, seen = threading.Event(), aio.Aio.__init__, []

    def slow(self, *args):
        others.wait(0.5)
        init(self, *args)

    aio.Aio.__init__ = slow
    threads = [threading.Thread(target=lambda: seen.append(w.aio)) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert seen[0] is seen[1] is w.aio
    w.close()


def test_threads_that_ask_for_the_awaitable_methods_get_the_same_ones(cast):
    runs(cast, two_threads_ask)


# -- joining --------------------------------------------------------------------------------------------------------


def canceller(me, size, when):
    noise = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        joining = asyncio.create_task(mw.join_async("w1", me.rank, size, store=me.store, timeout=60))
        if when == "waiting":
            await asyncio.to_thread(me.hear)
        else:  # in the moment it has come about
            while not registry.worlds():  # noqa: ASYNC110  (the very moment)
                await asyncio.sleep(0)
        joining.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        del joining

    asyncio.run(main())
    assert wait_for(lambda: not mw.worlds() and not registry._joining)
    gc.collect()
    assert noise == [], noise
    w = alone(me, "w1")  # the name is free again
    w.close()


def waiting(me, size):
    tell_error(me, lambda: mw.join("w1", me.rank, size, store=me.store, timeout=60))


def test_a_join_cancelled_twice_is_undone_and_told(cast):
    other = cast.start(waiting, 1, size=3)
    first = cast.start(canceller, 0, size=3, when="waiting")
    until_claimed(cast.server, {0, 1}, "w1")
    first.say("cancel")
    assert other.expect("raised").kind == "JoinAbandonedError"
    assert [first.finish(), other.finish()] == [0, 0]


def stays(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    assert wait_for(lambda: w.state is mw.State.BROKEN)
    me.emit("left", cause=str(w.breakage.cause))
    w.close()


def test_a_join_cancelled_too_late_leaves_the_world(cast):
    other = cast.start(stays, 1, size=2)
    first = cast.start(canceller, 0, size=2, when="joined")
    assert other.expect("left").cause == "left"
    assert [first.finish(), other.finish()] == [0, 0]


def interrupted(me, size):
    metrics.begin()
    told = []
    mw.subscribe(told.append)
    with pytest.raises(KeyboardInterrupt):
        mw.join("w1", me.rank, size, store=me.store, timeout=30)
    assert mw.worlds() == {}
    joining, failed = told
    assert isinstance(joining, mw.WorldJoining)
    assert isinstance(failed, mw.WorldJoinFailed)
    assert isinstance(failed.error, mw.JoinAbandonedError)
    assert "was interrupted (KeyboardInterrupt)" in str(failed.error)
    record = recorder._worlds["w1"]
    assert (record.joining, record.closed, record.counts["joins", "failed"]) == (False, True, 1)


def test_an_interrupted_join_is_told(cast):
    other = cast.start(waiting, 1, size=3)
    first = cast.start(interrupted, 0, size=3)
    until_claimed(cast.server, {0, 1}, "w1")
    os.kill(first.process.pid, signal.SIGINT)
    seen = other.expect("raised", timeout=60)
    assert seen.kind == "JoinAbandonedError"
    assert [first.finish(), other.finish()] == [0, 0]


INTERRUPTED = {"multiworld._join.join", "multiworld._join.steps", "multiworld._net.patience"}


class Interrupting:
    """Ctrl-C at the n-th line that this thread runs of what drives a join.

    Not where a ``with`` ends: Python itself looks for signals when the context's `__exit__` has begun, not before. Nor
    at a ``try:``, where it does not look for them: what a tracer raises there passes the blocks around it by.
    """

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, _):
        if event == "call":
            return self if frame.f_globals.get("__name__", "").startswith("multiworld.") else None
        if event == "line" and frame.f_globals["__name__"] in INTERRUPTED:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            self.left -= not line.lstrip().startswith(("with ", "try:"))
            if self.left == 0:
                self.left = -1
                raise KeyboardInterrupt
        return self


def interrupted_everywhere(me, step):
    at, interrupts = 1, 0
    while True:
        interrupting = Interrupting(at)
        try:
            sys.settrace(interrupting)
            w = mw.join("w1", me.rank, 2, store=me.store, timeout=8 * SOON)
        except KeyboardInterrupt:
            sys.settrace(None)
            interrupts, at = interrupts + 1, at + step
            for left in mw.worlds().values():  # it came when the join was over
                left.close()
            continue
        except mw.JoinError:
            continue  # the other one heard of the last interrupt in this attempt
        finally:
            sys.settrace(None)
        if interrupting.left <= 0:
            w.close()
            at += step
            continue
        break
    w.send(number(), 1 - me.rank)
    me.emit("interrupts", number=interrupts)
    w.close()


def joins_until_it_gets_something(me):
    longest, kinds = 0.0, set()
    while "message" not in kinds:
        began = time.monotonic()
        try:
            w = mw.join("w1", me.rank, 2, store=me.store, timeout=8 * SOON)
            w.recv(number(), 1 - me.rank)
            kinds.add("message")
        except mw.BrokenWorldException as error:
            kinds.add(str(error.cause))
        except mw.JoinError as error:
            kinds.add(type(error).__name__)
        longest = max(longest, time.monotonic() - began)
        for left in mw.worlds().values():
            left.close()
    me.emit("seen", kinds=kinds, longest=longest)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_join_interrupted_anywhere_is_told(cast, rank):
    other = cast.start(joins_until_it_gets_something, 1 - rank)
    first = cast.start(interrupted_everywhere, rank, step=2)
    seen = other.expect("seen", timeout=4 * PATIENCE)
    assert first.expect("interrupts").number > 20
    assert seen.kinds <= {"message", "left", "JoinAbandonedError"}, seen
    assert seen.longest < 4 * SOON, seen  # half of the timeout: each line of a join is traced
    assert [first.finish(), other.finish()] == [0, 0]


@pytest.mark.parametrize(
    ("name", "more"), [("\ud800", {}), ("x", {"device": "carrier"}), ("x", {"device": []})]
)
def test_names_and_devices_that_cannot_be(name, more):
    with pytest.raises(mw.InvalidJoinError, match=r"name|device"):
        mw.join(name, 0, 1, store="file:///dev/shm/m8d-never", timeout=1, **more)
    assert mw.worlds() == {}


# -- asyncio --------------------------------------------------------------------------------------------------------


def smooth(me, size):
    detector.GRACE = 2.0  # in this process: longer than it stalls
    w = mw.join("w1", me.rank, size, store=me.store, timeout=30, hang_timeout=30)
    w.barrier()
    if me.rank == 0:
        w._gen.lane.endpoint.fail(ConnectionError())  # its connections close, without a reason
        me.hear()
        w.close()
        return

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.5)
        ticks, began = 0, time.monotonic()
        with pytest.raises(mw.BrokenWorldException):
            await w.aio.send(number(), 0)
        ticking.cancel()
        return ticks, time.monotonic() - began

    ticks, took = asyncio.run(main())
    # The reason is waited for (normally half a second, for something better than a closed connection), not on the loop.
    assert took > 1.0
    assert ticks >= 5
    assert w.breakage.cause is Cause.FAILED
    me.emit("done")
    w.close()


def test_explaining_an_error_does_not_hold_up_the_loop(cast):
    leader, other = cast.all(smooth, 2)
    other.expect("done")
    leader.say("close")
    assert [leader.finish(), other.finish()] == [0, 0]


def two_loops(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=30)
    done = []

    def run(tag):
        async def main():
            for value in range(50):
                if me.rank == 0:
                    await w.aio.send(number(value), 1, tag=tag)
                else:
                    assert await w.aio.recv(t := number(), 0, tag=tag) == 0
                    assert t.item() == value
            if tag == 0:
                await w.aio.all_gather_object(got := [None] * size, me.rank)
                assert got == list(range(size))
            done.append(tag)

        asyncio.run(main())

    threads = [threading.Thread(target=run, args=(tag,)) for tag in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1]
    asyncio.run(w.aio.barrier())  # a third loop, when the others are closed
    w.close()


def test_several_loops_in_several_threads(cast):
    runs(cast, two_loops, 2)


# -- calls ----------------------------------------------------------------------------------------------------------


class Custom:
    def __eq__(self, other):
        return isinstance(other, Custom)

    __hash__ = None


def objects(me, size):
    import pickle

    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    mine = me.rank == 0
    large = "x" * 5_000_000
    for sent in ([], [large, None, 2.5, {"a": [1, (True,)]}], [torch.arange(12).view(3, 4).t()]):
        got = list(sent) if mine else [None] * len(sent)
        w.broadcast_object_list(got, 0)
        assert all(
            torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(got, sent, strict=True)
        )
        if mine:
            w.send_object_list(sent, 1)
        else:
            got = [None] * len(sent)
            assert w.recv_object_list(got, None if sent else 0) == 0  # gloo takes nothing from anybody
            assert len(got) == len(sent)
    with pytest.raises(ValueError, match="dst 9"):
        w.gather_object(1, [None] * size, 9)
    got = [Custom()] if mine else [None]
    if mine:
        w.broadcast_object_list(got, 0)
    else:
        with pytest.raises(pickle.UnpicklingError, match=r"from rank 0.*\(test_world_more\.Custom\)"):
            w.broadcast_object_list(got, 0)
    w.broadcast_object_list(got, 0, weights_only=False)
    assert got == [Custom()]
    for dtype, shape in (
        (torch.complex64, (3,)),
        (torch.float32, (0,)),
        (torch.bool, (2, 2)),
        (torch.float64, ()),
    ):
        t = torch.ones(shape, dtype=dtype)
        if mine:
            w.send(t, 1)
        else:
            w.recv(got := torch.zeros(shape, dtype=dtype), 0)
            assert torch.equal(got, t)
    t = torch.tensor([1 + 2j])
    w.all_reduce(t)
    assert t.item() == size * (1 + 2j)
    w.all_reduce(torch.zeros(0))
    t = torch.full((2,), float(me.rank))
    w.all_reduce(t, dist.ReduceOp.MAX)
    assert t.tolist() == [size - 1.0] * 2
    assert w.gather(t, gather_list=[torch.zeros(2) for _ in range(size)] if mine else None, dst=0) is None
    w.barrier()
    w.close()


def test_objects_and_tensors_of_all_kinds(cast):
    runs(cast, objects, 2)


def single(me, size):
    w = alone(me)
    ones = lambda: torch.ones(2)  # noqa: E731
    w.all_reduce(ones(), op=dist.ReduceOp.SUM)
    w.broadcast(ones(), 0)
    w.reduce(ones(), 0, dist.ReduceOp.MAX)
    w.gather(ones(), gather_list=[ones()], dst=0)
    w.scatter(ones(), [ones()], src=0)
    w.all_gather([ones()], ones())
    w.all_gather_into_tensor(ones(), ones())
    for call, args in (
        (w.reduce_scatter, (ones(), [ones()])),
        (w.reduce_scatter_tensor, (ones(), ones())),
        (w.all_to_all, ([ones()], [ones()])),
    ):
        try:
            call(*args)
        except RuntimeError as exc:  # noqa: PERF203  (gloo of torch 2.4)
            assert "does not support" in str(exc)  # noqa: PT017  (it need not raise)
    w.all_to_all_single(ones(), ones())
    w.barrier(device_ids=[0])
    for fill in (w.all_gather_object, lambda got, obj: w.gather_object(obj, got)):
        fill(got := [None], "x")
        assert got == ["x"]
    w.scatter_object_list(got := [None], ["y"])
    assert got == ["y"]
    w.broadcast_object_list(got, 0)
    for call in (w.send, w.recv, w.isend, w.irecv):
        with pytest.raises(ValueError, match="not a peer"):
            call(ones(), 0)

    async def awaited():
        await w.aio.all_reduce(ones())
        await w.aio.barrier([0])
        await w.aio.gather(ones(), [ones()])
        await w.aio.all_gather_object([None], 1)
        with pytest.raises(ValueError, match="not a peer"):
            await w.aio.recv(ones(), 0)

    asyncio.run(awaited())
    with w:
        dist.destroy_process_group()
    assert wait_for(lambda: w.state is mw.State.CLOSED)
    assert mw.worlds() == {}
    assert w.rejoin().generation == 2
    w.close()


def test_a_world_of_one(cast):
    runs(cast, single)


def asking_when_it_is_over(me, size):
    def answers():
        return (
            dist.get_rank(),
            dist.get_world_size(),
            dist.get_backend(),
            dist.is_initialized(),
            dist.get_rank(sub),
        )

    w = mw.join("one", me.rank, size, store=me.store, timeout=60)
    with w:
        sub = dist.new_group([1, 0])
        before = answers()
        assert before[:4] == (me.rank, size, "gloo", True)
        dist.barrier()
        child = os.fork()
        if not child:
            code = 1
            try:
                code = int(answers() != before)
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        break_it(w)
        assert answers() == before
        assert dist.get_process_group_ranks(sub) == [0, 1]
        with pytest.raises(mw.BrokenWorldException):
            dist.barrier()
        w.close(timeout=1)  # not all is free: `sub` is held here
        assert answers() == before
        with pytest.raises(mw.WorldClosedError):
            dist.barrier()
        with pytest.raises(mw.WorldClosedError):
            dist.all_gather_object([None] * size, 1)
    assert not dist.is_initialized()


def test_error_handlers_may_ask_a_world_that_is_over(cast):
    runs(cast, asking_when_it_is_over, 2)
