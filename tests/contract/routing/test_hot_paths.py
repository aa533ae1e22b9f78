"""Which way an operation goes, and that both ways mean the same; in one process, with a world of one member."""

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import multiworld as mw
from multiworld._c10d.gloo import await_work as module
from multiworld._c10d.gloo import part_sizes
from multiworld._c10d.gloo.await_work import Habit
from multiworld._c10d.lane.tensors import carried
from multiworld._c10d.routing.state import owner_of


@pytest.fixture
def world():
    made = mw.join("hot", 0, 1, store=dist.HashStore(), backend="gloo", timeout=20)
    yield made
    assert made.close()


class Seen(TorchDispatchMode):
    """Counts what passes torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_tensors_go_to_the_backend_and_all_others_torchs_way(world):
    takes, plain = world._gen.direct.takes, torch.ones(3)
    assert takes(plain)
    for other in (
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, device="meta"),
        3,
    ):
        assert not takes(other)
    with Seen() as seen:
        assert not takes(plain)
        world.all_reduce(plain)
    assert any("c10d" in name for name in seen.names)
    with torch.profiler.profile() as profile:
        assert not takes(plain)
        world.all_reduce(plain)
    assert any("allreduce" in event.key or "all_reduce" in event.key for event in profile.key_averages())
    number = torch.tensor([1 + 2j])
    world.all_reduce(number)
    assert number.item() == 1 + 2j


def test_values_and_errors_are_torchs(world):
    one, two = torch.arange(4.0), torch.zeros(4)
    world.all_reduce(one, dist.ReduceOp.MAX)
    world.broadcast(one, 0)
    world.reduce(one, 0)
    world.all_gather_into_tensor(two, one)
    assert torch.equal(two, torch.arange(4.0))
    parts = [torch.zeros(4)]
    world.all_gather(parts, one)
    assert torch.equal(parts[0], one)
    world.barrier()

    def failed(fn):
        with pytest.raises(Exception) as caught:
            fn()
        return type(caught.value), str(caught.value).partition("\n")[0]

    for mine, torchs in (
        (lambda: world.broadcast(one, 5), lambda: dist.broadcast(one, 5)),
        (lambda: world.all_reduce(3), lambda: dist.all_reduce(3)),
        (lambda: world.all_reduce(one, "sum"), lambda: dist.all_reduce(one, "sum")),
    ):
        with world:
            expected = failed(torchs)
        assert failed(mine) == expected


def test_awaited_collectives_and_the_end(world):
    async def main():
        tensor = torch.ones(2)
        for _ in range(40):  # more than may end without a turn of the loop
            await world.aio.all_reduce(tensor)
            await world.aio.broadcast(tensor, 0)
        return tensor

    assert torch.equal(asyncio.run(main()), torch.ones(2))
    group = world.group
    assert owner_of(group) is world._gen.c10d
    world.close()
    assert owner_of(group) is None
    with pytest.raises(mw.WorldClosedError):
        world.all_reduce(torch.ones(1))
    with pytest.raises(mw.WorldClosedError):
        asyncio.run(world.aio.all_reduce(torch.ones(1)))


def test_naps_stop_where_they_do_not_pay_and_come_back():
    habit = Habit()
    naps = 0
    for _ in range(1000):
        if habit.naps():
            naps += 1
            habit.learn(hit=False)
    assert naps < 40
    while not habit.naps():
        pass
    habit.learn(hit=True)
    assert all(habit.naps() for _ in range(100))


class Slow:
    """A work whose end somebody else decides, waited for as gloo's is."""

    def __init__(self):
        self.over = threading.Event()


@pytest.fixture
def waiting(monkeypatch):
    """`AwaitedWork`s of such works: no naps, so each is awaited."""
    monkeypatch.setattr(module, "_wait", lambda work: work.over.wait(30))
    monkeypatch.setattr(module, "NAP", 0.0)


def begun(loop):
    work = Slow()
    return work, module.AwaitedWork(work, module.queue_of(loop), loop)


def test_a_task_goes_on_in_its_own_context_though_it_is_empty(waiting):
    kept = contextvars.ContextVar("kept")

    async def main():
        loop = asyncio.get_running_loop()
        work, ending = begun(loop)
        loop.call_later(0.01, work.over.set)
        await ending.until_over(Habit())
        token = kept.set(1)
        await asyncio.sleep(0)
        assert kept.get() == 1
        kept.reset(token)

    contextvars.Context().run(asyncio.run, main())


def test_what_ends_during_a_nap_needs_no_turn_of_the_loop(waiting, monkeypatch):
    monkeypatch.setattr(module, "NAP", 20.0)

    async def main():
        loop = asyncio.get_running_loop()
        work, ending = begun(loop)
        turns = []
        timer = threading.Timer(0.1, work.over.set)
        timer.start()
        waits = ending.until_over(Habit())
        with pytest.raises(StopIteration):
            turns.append(waits.send(None))
        assert turns == []
        timer.join()

    asyncio.run(main())


def test_there_is_no_nap_while_another_operation_is_under_way(waiting, monkeypatch):
    monkeypatch.setattr(module, "NAP", 20.0)

    async def main():
        loop = asyncio.get_running_loop()
        queue = module.queue_of(loop)
        queue.pending += 1
        work, ending = begun(loop)
        loop.call_later(0.01, work.over.set)  # which a nap would keep from its turn
        await asyncio.wait_for(ending.until_over(Habit()), 10)
        queue.pending -= 1

    asyncio.run(main())


def test_an_error_in_a_nap_is_raised(waiting, monkeypatch):
    monkeypatch.setattr(module, "NAP", 20.0)

    def fail(work):
        raise RuntimeError("the other one went away")

    monkeypatch.setattr(module, "_wait", fail)

    async def main():
        _, ending = begun(asyncio.get_running_loop())
        with pytest.raises(RuntimeError, match="went away"):
            await ending.until_over(Habit())

    asyncio.run(main())


def test_a_cancellation_keeps_its_message(waiting):
    async def main():
        loop = asyncio.get_running_loop()
        work, ending = begun(loop)

        async def wait():
            await ending.until_over(Habit())

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        task.cancel("why")
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert caught.value.args == ("why",)
        work.over.set()

    asyncio.run(main())


def test_tasks_that_go_on_and_on_leave_the_loops_others_their_turn():
    async def main():
        loop = asyncio.get_running_loop()
        queue = module.queue_of(loop)
        turns = []

        class Again:
            """Ends again as soon as its task goes on."""

            def __init__(self):
                self.left = 50

            def step(self):
                self.left -= 1
                if self.left:
                    queue.ended(self, loop)

        def count():
            turns.append(sum(each.left for each in every))
            if any(each.left for each in every):
                loop.call_soon(count)
            else:
                over.set()

        over = asyncio.Event()
        every = [Again() for _ in range(4)]
        for each in every:
            queue.ended(each, loop)
        loop.call_soon(count)
        await over.wait()
        # Somebody else's callback had a turn between any two steps of a task.
        assert len(turns) >= 49

    asyncio.run(main())


def test_a_view_that_only_says_that_it_is_negated_goes_torchs_way(world):
    direct = world._gen.direct
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    assert not direct.takes(negated)
    assert direct.takes(torch.ones(1))
    torch.vmap(lambda each: (_refused(direct, each), each)[1])(torch.ones(3))


def _refused(direct, tensor):
    assert not direct.takes(tensor)
    assert not carried(tensor)


class Counted:
    """Counts the calls of multiworld's own Python functions in this thread: the same whatever the machine's load."""

    # How often a loop is woken, and by which thread, is the machine's affair.
    ELSEWHERE = ("gloo/await_work.py", "waiter_pool.py")

    def __init__(self):
        self.calls = 0

    def __enter__(self):
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *exc):
        sys.setprofile(None)

    def _profile(self, frame, event, _arg):
        code = frame.f_code
        coroutine = code.co_flags & inspect.CO_COROUTINE  # each resumption of one is told as a call
        if event == "call" and code.co_filename.startswith(OWN) and not coroutine:
            self.calls += not code.co_filename.endswith(self.ELSEWHERE)


OWN = str(Path(mw.__file__).parent)
TIMES = 20


@pytest.mark.parametrize(
    ("name", "blocking", "awaited"),
    [
        ("broadcast", 5, 6), ("all_reduce", 5, 6), ("reduce", 5, 6), ("all_gather", 5, 6), ("barrier", 5, 6),
        ("all_gather_into_tensor", 5, 6), ("reduce_scatter_tensor", 5, 6),
    ],
)  # fmt: skip
def test_a_collective_takes_so_many_calls_of_python_at_most(world, name, blocking, awaited):
    one, two = torch.ones(1), torch.ones(1)
    args = {
        "barrier": (),
        "all_reduce": (one,),
        "all_gather": ([two], one),
        "broadcast": (one, 0),
        "reduce": (one, 0),
    }
    given = args.get(name, (one, two))

    async def main():
        method = getattr(world.aio, name)
        await method(*given)
        with Counted() as found:
            for _ in range(TIMES):
                await method(*given)
        return found.calls

    # Gloo of an older torch does not compare the sizes of parts itself.
    more = 5 if part_sizes.NEEDED and name == "reduce_scatter_tensor" else 0
    method = getattr(world, name)
    method(*given)
    with Counted() as found:
        for _ in range(TIMES):
            method(*given)
    assert found.calls <= (blocking + more) * TIMES
    assert asyncio.run(main()) <= (awaited + more) * TIMES


def calls_of(run):
    """Calls for each message; the least of several counts, for one that comes late may take another call."""
    with Counted() as counted:
        run(TIMES)
    return counted.calls / (2 * TIMES)


def messages(me, size):
    """Both send and receive, in each form; what a message takes is told, sent and received."""
    world = mw.join("hot", me.rank, size, store=me.store, timeout=60)
    tensor, peer = torch.ones(1), 1 - me.rank

    def to_and_fro(send, recv, times):
        for _ in range(times):
            for fn in (send, recv) if me.rank == 0 else (recv, send):
                fn(tensor, peer)

    async def awaited(times):
        for _ in range(times):
            for fn in (world.aio.send, world.aio.recv) if me.rank == 0 else (world.aio.recv, world.aio.send):
                await fn(tensor, peer)

    found = {}
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        for form, run in (
            ("world", lambda times: to_and_fro(world.send, world.recv, times)),
            ("block", lambda times: to_and_fro(dist.send, dist.recv, times)),
            ("aio", lambda times: loop.run_until_complete(awaited(times))),
        ):
            with world if form == "block" else contextlib.nullcontext():
                run(3)
                found[form] = min(calls_of(run) for _ in range(3))
    world.barrier()
    me.emit("counted", closed=world.close(), **found)


def test_a_message_takes_so_many_calls_of_python_at_most(cast):
    members = cast.all(messages, 2)
    for member in members:
        seen = member.expect("counted")
        assert seen.closed
        # The lane is written in Python, so there are some; each costs less than a tenth of a microsecond.
        assert seen.world <= 16.0, seen
        assert seen.block <= 44.0, seen  # torch's functions ask the router more or less often
        assert seen.aio <= 45.0, seen
    assert [member.finish() for member in members] == [0, 0]
