"""Waiting for an operation on the GPU, its end, and the order in which a world is over; with works that are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
import types
import weakref

import pytest
from kits.meetkit import until

torch = pytest.importorskip("torch")

from multiworld._c10d import fault_classification  # noqa: E402  (torch may be missing)
from multiworld._c10d.nccl import backend as nccl  # noqa: E402  (torch may be missing)
from multiworld._c10d.nccl import hooks, inflight, loaded  # noqa: E402
from multiworld._c10d.nccl.inflight import Traffic, failure_of  # noqa: E402

Error = inflight.DistBackendError


class Future:
    def __init__(self, result=None):
        self.result = result

    def done(self):
        return self.result is not None

    def value(self):
        return self.result


class Work:
    """What torch's works answer, scripted."""

    def __init__(self, *, after=0, result=0, error=None):
        self.asked, self.after, self.result, self.error = 0, after, result, error

    def is_completed(self):
        self.asked += 1
        return self.asked > self.after

    def get_future_result(self):
        return Future(self.result)

    def exception(self):
        if isinstance(self.error, TypeError):
            raise self.error
        return self.error


@pytest.fixture(autouse=True)
def plain_works(monkeypatch):
    monkeypatch.setattr(inflight, "_is_completed", Work.is_completed)


def traffic(**more):
    return Traffic(
        timeout=more.pop("timeout", 30.0), device=torch.device("cuda", 0), torch_aborts=False, **more
    )


def test_a_work_is_asked_until_it_has_ended():
    work = Work(after=40)
    traffic().finish(work)
    assert work.asked == 41


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (Work(result=2, error=RuntimeError("ncclRemoteError: gone")), "ncclRemoteError: gone"),
        (Work(result=1, error=TypeError("cannot be converted")), "it timed out"),
        (Work(result=2, error=TypeError("cannot be converted")), "its communicator failed"),
    ],
)
def test_a_failure_is_told_in_words_that_are_a_transport_fault(work, text):
    with pytest.raises(Error, match=text) as told:
        traffic().finish(work)
    assert fault_classification.classify(told.value) is not None


def test_works_of_versions_that_keep_no_outcome_are_asked_for_their_exception():
    class Old:
        def exception(self):
            return RuntimeError("old")

    assert failure_of(Old()) == "old"
    assert failure_of(Work(result=None, error=RuntimeError("not asked"))) is None


def test_an_operation_that_takes_too_long_is_a_timeout():
    with pytest.raises(Error) as told:
        traffic().finish(Work(after=1 << 60), timeout=0.05)
    fault = fault_classification.classify(told.value)
    assert fault is not None
    assert fault.timeout


def test_who_waits_is_woken_when_the_world_is_over_and_the_abort_comes_after():
    here, order = traffic(), []
    failed: list[BaseException] = []

    def wait():
        try:
            here.finish(Work(after=1 << 60))
        except Error as error:
            failed.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    here.abort([lambda: order.append("aborted")])
    waiter.join(20)
    assert not waiter.is_alive()
    assert fault_classification.classify(failed[0]) is not None
    assert here.ended(time.monotonic() + 20)
    assert order == ["aborted"]
    with pytest.raises(Error):
        here.verify()


def test_no_abort_begins_while_a_call_is_under_way():
    here, began = traffic(), threading.Event()
    with here.call():
        here.abort([began.set])
        assert here.over.is_set()
        assert not began.wait(inflight.QUIET / 5)
    assert began.wait(20)


def test_a_call_that_hangs_does_not_hold_the_abort_up_for_ever(monkeypatch):
    monkeypatch.setattr(inflight, "QUIET", 0.05)
    here, began = traffic(), threading.Event()
    with here.call():
        here.abort([began.set])
        assert began.wait(20)


def test_an_abort_that_hangs_is_left_behind():
    here, go = traffic(), threading.Event()
    here.abort([lambda: go.wait(60) and None])
    assert not here.ended(time.monotonic() + 0.05)
    go.set()
    assert here.ended(time.monotonic() + 20)


def test_a_failed_operation_waits_for_the_abort_and_not_for_ever(monkeypatch):
    world, done = traffic(), threading.Event()
    world.abort([lambda: done.wait(30) and None])
    threading.Timer(0.3, done.set).start()
    world.still(Work())
    assert done.is_set()
    assert world._unended == []

    monkeypatch.setattr(inflight, "STILL", 0.2)
    world, done, work = traffic(), threading.Event(), Work()
    world.abort([lambda: done.wait(30) and None])
    began = time.monotonic()
    world.still(work)
    assert time.monotonic() - began < 5
    assert world._unended == [work]
    done.set()


def test_an_abort_that_torch_gave_up_is_over_when_nccl_is_through(monkeypatch):
    # A patched build's abort returns though NCCL's goes on: at once, where torch's watchdog began it before.
    monkeypatch.setattr(inflight, "STILL", 0.2)
    kept = []
    monkeypatch.setattr(inflight, "_hanging", kept)
    here, over, work = traffic(), threading.Event(), Work()
    here.abort([lambda: lambda: not over.is_set()])
    until(lambda: kept)
    here.still(work)
    assert here._unended == [work]
    assert here.ended(time.monotonic()) is False
    threading.Timer(0.1, over.set).start()
    assert here.ended(time.monotonic() + 30)
    assert kept == here._unended == []


def test_what_is_kept_for_an_abort_is_let_go_when_that_ends_though_nothing_asks(monkeypatch):
    monkeypatch.setattr(inflight, "STILL", 0.1)
    here, over, work = traffic(), threading.Event(), Work()

    class Backend:
        def _is_initialized(self):
            return not over.is_set()

    def abort(backend):
        here.abort([lambda: backend._is_initialized])
        return weakref.ref(backend)

    kept = abort(Backend())
    here.still(work)
    assert here.ended(time.monotonic()) is False
    assert here._unended == [work]
    assert kept() is not None
    over.set()
    until(lambda: kept() is None and not here._unended)


def test_an_abort_that_took_long_and_ended_is_over(monkeypatch):
    kept = []
    monkeypatch.setattr(inflight, "_hanging", kept)
    here = traffic()
    here.abort([lambda: lambda: False])
    assert here.ended(time.monotonic() + 30)
    assert kept == []


def test_what_an_abort_that_ends_late_writes_to_is_let_go_then(monkeypatch):
    monkeypatch.setattr(inflight, "STILL", 0.1)
    here, done, work = traffic(), threading.Event(), Work()
    here.abort([lambda: done.wait(30) and None, lambda: done.wait(30) and None])
    here.still(work)
    assert here._unended == [work]
    done.set()
    assert here.ended(time.monotonic() + 30)
    assert here._unended == []


def test_an_abort_without_a_thread_is_not_over_and_begins_later(monkeypatch):
    here, ended = traffic(), []
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "m8d-abort":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", refused)
        here.abort([lambda: ended.append(1)])
        assert here.over.is_set()
        assert here.ended(time.monotonic()) is False
    assert here.ended(time.monotonic() + 30)
    assert ended == [1]


def test_an_abort_that_fails_is_over():
    def fail():
        raise RuntimeError("as told")

    here = traffic()
    here.abort([fail])
    assert here.ended(time.monotonic() + 20)


def test_an_abort_that_fails_where_the_build_tells_is_over_when_nccl_is_through(monkeypatch):
    """A patched build's watchdog tries again where the process could have no more threads."""
    kept, given_up = [], []
    monkeypatch.setattr(inflight, "_hanging", kept)
    monkeypatch.setattr(nccl, "_given_up", given_up)
    over = threading.Event()

    class Backend:
        def name(self):
            return "nccl"

        def abort(self):
            raise RuntimeError("Resource temporarily unavailable")

        def _is_initialized(self):
            return not over.is_set()

    here = traffic()
    here.abort([nccl.aborter(Backend(), tells=True)])
    until(lambda: kept)
    assert len(given_up) == 1
    assert here.ended(time.monotonic()) is False
    over.set()
    assert here.ended(time.monotonic() + 30)
    assert kept == []


def test_a_block_says_that_the_world_ended_in_it_once(monkeypatch):
    here, settled = traffic(), []

    def settle():
        settled.append(1)
        here.verify()

    monkeypatch.setattr(here, "settle", settle)
    here.block_begins()
    here.block_ends(failed=False)
    assert settled == [1]
    here.block_begins()
    here.abort([])
    with pytest.raises(Error):
        here.block_ends(failed=False)
    here.block_begins()  # of a world that is over already: nothing can be in flight
    here.block_ends(failed=False)
    assert len(settled) == 2


def test_released_backends_are_kept_while_any_thread_is_in_a_block(monkeypatch):
    """A thread may wait in C++ for an operation whose work gives its events back to its backend (nccl2)."""
    monkeypatch.setattr(Traffic, "settle", lambda _: None)
    flight, backend, other = traffic(), object(), threading.Event()
    flight.keep_for_blocks([backend])
    assert flight.kept_for_blocks() == [], "no thread is in a block"

    def stay():
        flight.block_begins()
        entered.set()
        other.wait(30)
        flight.block_ends(failed=False)

    entered = threading.Event()
    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(30)
    flight.block_begins()
    flight.block_begins()
    flight.keep_for_blocks([backend])
    flight.block_ends(failed=False)
    flight.block_ends(failed=True)
    assert flight.kept_for_blocks() == [backend], "the other thread is in one"
    other.set()
    thread.join()
    assert flight.kept_for_blocks() == []


def test_a_block_is_silent_where_a_call_in_it_has_raised_or_another_error_leaves_it(monkeypatch):
    here = traffic()
    monkeypatch.setattr(here, "settle", here.verify)
    here.block_begins()
    here.abort([])
    here.told()
    here.block_ends(failed=False)
    other = traffic()
    monkeypatch.setattr(other, "settle", other.verify)
    other.block_begins()
    other.abort([])
    other.block_ends(failed=True)


def test_a_block_says_it_although_another_task_of_the_thread_was_told(monkeypatch):
    here = traffic()
    monkeypatch.setattr(here, "settle", here.verify)
    broke, told = asyncio.Event(), asyncio.Event()

    async def waits():
        here.block_begins()
        await broke.wait()
        here.told()
        here.block_ends(failed=True)
        told.set()

    async def posts():
        here.block_begins()
        here.abort([])
        broke.set()
        await told.wait()
        with pytest.raises(Error):
            here.block_ends(failed=False)

    async def both():
        await asyncio.gather(waits(), posts())

    asyncio.run(both())


def test_a_task_that_was_told_says_nothing_for_the_block_it_was_started_in(monkeypatch):
    here = traffic()
    monkeypatch.setattr(here, "settle", here.verify)

    async def told():
        here.told()

    async def block():
        here.block_begins()
        here.abort([])
        await asyncio.create_task(told())
        with pytest.raises(Error):
            here.block_ends(failed=False)

    asyncio.run(block())


class SubGroup:
    """A process group whose only operation succeeds, and whose backend is not asked."""

    def allreduce(self, tensors):
        return tuple(tensors)

    def _get_backend(self, device):
        raise RuntimeError("none")


class Event:
    def record(self, stream):
        pass

    def query(self):
        return True


@pytest.fixture
def waited(monkeypatch):
    """Works that were waited for at the end of a block; the GPU has always ended."""
    works = []
    monkeypatch.setattr(inflight, "plain_wait", works.append)
    monkeypatch.setattr(inflight, "failure_of", lambda work: None)
    monkeypatch.setattr(inflight, "_is_completed", lambda work: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return works


def test_an_abort_while_a_thread_stands_still_in_its_last_look_counts(monkeypatch, waited):
    here = Traffic(timeout=30.0, device=torch.device("cpu"), torch_aborts=False)

    def stood_still(_):
        here.abort([])
        return True  # ended, and by the abort

    monkeypatch.setattr(Event, "query", stood_still)
    with pytest.raises(Error):
        here.settle()


def test_a_group_that_was_destroyed_leaves_nothing_and_is_not_asked(monkeypatch, waited):
    here = Traffic(timeout=30.0, device=torch.device("cpu"), torch_aborts=True)
    owned = []
    monkeypatch.setattr(nccl, "owner_of", lambda group: here if group in owned else None)
    for _ in range(100):
        group = SubGroup()
        owned.append(group)
        nccl.connect(group, here)
        if len(owned) > 1:
            owned.pop()  # as destroy_process_group, although `group` is kept until the next turn
    here.settle()
    assert len(waited) == 1, "the first group alone is there"
    assert len(here._canaries) == 1
    here.released()
    here.settle()
    assert len(waited) == 1


class Backend:
    """Torch's older NCCL, as `close_thread_group` sees it: groups within each other, the outermost of which failed."""

    def __init__(self, depth):
        self.depth, self.ends = depth, 0

    def _group_end(self):
        self.ends += 1
        self.depth -= 1
        if self.depth <= 0:
            raise RuntimeError("ncclRemoteError" if self.depth == 0 else "ncclInvalidUsage")


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_groups_of_a_thread_are_closed_to_the_last(monkeypatch, depth):
    backend = Backend(depth)

    class Group:
        def _get_backend(self, _device):
            return backend

    monkeypatch.setattr(loaded, "group_end", lambda: None)
    nccl.close_thread_group(Group(), torch.device("cuda"))
    assert backend.ends == max(1, depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_they_are_closed_by_nccl_itself_where_it_is_a_library(monkeypatch, depth):
    # torch's own end would count a group as closed that it had not counted as open.
    backend, left = Backend(depth), [depth]

    class Group:
        def _get_backend(self, _device):
            return backend

    def end():
        left[0] -= 1
        return 5 if left[0] < 0 else 0

    monkeypatch.setattr(loaded, "group_end", lambda: end)
    nccl.close_thread_group(Group(), torch.device("cuda"))
    assert (left[0], backend.ends) == (-1, 0)


def test_a_wait_asks_in_the_mode_that_leaves_other_threads_captures_alone(monkeypatch):
    mode, seen = ctypes.c_int(0), []

    def exchange(given):
        mine, mode.value = mode.value, given._obj.value
        given._obj.value = mine
        return 0

    monkeypatch.setattr(loaded, "_exchange_mode", lambda: exchange)
    traffic().until(lambda: seen.append(mode.value) or len(seen) > 2, None)
    assert (seen, mode.value) == ([1, 1, 1], 0)
    seen.clear()
    monkeypatch.setattr(inflight, "_is_completed", lambda _: seen.append(mode.value) or True)
    Traffic(timeout=1.0, device=torch.device("cpu"), torch_aborts=True).finish(Work())
    assert (seen, mode.value) == ([1, 1], 0)

    def refuse(_given):  # no driver
        return 35

    monkeypatch.setattr(loaded, "_exchange_mode", lambda: refuse)
    traffic().until(lambda: True, None)


def test_cuda_is_waited_for_without_the_gil_before_torch_asks_it_with_it(monkeypatch):
    asked = []
    monkeypatch.setattr(inflight, "wait_for_cuda", asked.append)
    here = traffic()
    here.until(lambda: True, None)
    assert not asked, "what ends soon while nothing is aborted"
    with monkeypatch.context() as aborting:
        aborting.setattr(inflight, "_aborts", [None])
        here.until(lambda: True, None)
    assert asked == [here.device]
    here.until(lambda: len(asked) > 1, None)
    ending = threading.Event()
    here.abort([lambda: asked.append(list(inflight._aborts)) or ending.set()])
    assert ending.wait(30)
    assert here.ended(time.monotonic() + 30)
    assert len(asked[-1]) == 1
    assert not inflight._aborts


def test_a_gpu_that_is_of_no_more_use_is_told_as_a_fault(monkeypatch):
    monkeypatch.setattr(inflight, "wait_for_cuda", lambda _device: "device-side assert triggered")
    here = traffic()
    with pytest.raises(Error, match="CUDA error: device-side assert triggered") as told:
        here.until(lambda: False, None)
    assert fault_classification.classify(told.value) is not None
    said = here.of_device(RuntimeError("cuEventQuery"))
    assert str(said) == "NCCL operation failed: CUDA error: device-side assert triggered"
    assert fault_classification.classify(said) is not None
    monkeypatch.setattr(inflight, "wait_for_cuda", lambda _device: None)
    error = RuntimeError("invalid argument")
    assert here.of_device(error) is error


def test_cuda_tells_that_it_is_of_no_more_use(monkeypatch):
    results, asked = [0, 0, 710], []

    def answer(call):
        asked.append(call)
        return results.pop(0)

    cuda = types.SimpleNamespace(
        cudaGetErrorString=lambda result: {710: b"device-side assert triggered"}[result],
        cudaEventCreateWithFlags=lambda *_: answer("create"),
        cudaEventQuery=lambda _event: answer("query"),
    )
    monkeypatch.setattr(loaded, "_cuda", lambda: cuda)
    monkeypatch.setattr(loaded, "_events", {})
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    device = torch.device("cuda", 0)
    assert [loaded.wait_for_cuda(device) for _ in range(3)] == [None, None, "device-side assert triggered"]
    assert asked == ["create", "query", "query"]
    monkeypatch.setattr(loaded, "_cuda", lambda: None)
    assert loaded.wait_for_cuda(device) is None


def test_operations_are_run_one_by_one_and_the_last_ones_work_is_everybodys():
    calls = []
    last = nccl.one_by_one(
        "allgather_into_tensor_coalesced",
        lambda *args: calls.append(args) or len(calls),
        ["a", "b"],
        ["c", "d"],
        "opts",
    )
    assert calls == [("a", "c", "opts"), ("b", "d", "opts")]
    assert last == 2
    assert nccl.one_by_one("allreduce_coalesced", lambda *_: None, []) is None


def test_every_coalesced_operation_of_this_torch_is_known_and_what_it_is_made_of():
    methods = vars(torch.distributed.ProcessGroup)
    # NCCL refuses allgather_coalesced.
    coalesced = {name for name in methods if name.endswith("_coalesced")} - {"allgather_coalesced"}
    assert coalesced == set(nccl.SINGLE) & set(methods)
    assert {nccl.SINGLE[name] for name in coalesced} <= set(methods)


def test_a_world_that_ends_while_a_left_group_is_closed_replaces_no_error(monkeypatch):
    here, answers = traffic(fragile=True), [True, False]  # it ends between the first look and the call
    monkeypatch.setattr(here.over, "is_set", answers.pop)
    hooks.close_left_group(types.SimpleNamespace(traffic=here, group=object()))
    assert answers == []
