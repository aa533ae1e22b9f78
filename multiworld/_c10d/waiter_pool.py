"""Awaitable completion of operations without a thread for each; the hot paths are in `gloo/await_work.py`.

On the CPU a collective's work has a future that torch completes. A send's or receive's has none, and
`is_completed()` stays false until a thread waits for it. A small pool of threads waits for those: a pool per
operation costs hundreds of microseconds, and polling costs a core.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from operator import methodcaller
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Container

    Job = Callable[[], Callable[[], None] | None]

__all__ = ["Pool", "ending", "fail", "future_of", "outcome_of", "pool", "raises_last", "without_future"]

_T = TypeVar("_T")

LIMIT = 512
"""Threads at most; further jobs wait for a free one. A blocked receive occupies one for its whole
duration."""

IDLE = 5.0
"""Seconds after which an idle thread ends; it may take twice as long."""


class Completing(Protocol):
    """A future of torch's."""

    def add_done_callback(self, callback: Callable[..., None], /) -> None:
        """Call it with the future once that is done."""


class Promising(Protocol):
    """A ``torch.distributed.Work``, as `future_of` asks it."""

    def get_future(self) -> Completing:
        """Its future; raises where it has none."""


class Pool:
    """Daemon threads for blocking waits, started when all others are busy, never joined.

    Args:
        limit: threads at most.
        idle: seconds after which an idle thread ends.
        name: prefix of the threads' names.
    """

    def __init__(self, *, limit: int = LIMIT, idle: float = IDLE, name: str = "m8d-waiter") -> None:
        self._limit = limit
        self._idle_seconds = idle
        self._name = name
        self._registered = False
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._sleeping: list[_Waiter] = []
        self._threads = 0
        self._made = 0
        self._reaping = False
        self._reap_now = threading.Event()

    @property
    def threads(self) -> int:
        """Number of threads."""
        return self._threads

    def wait(self, fn: Callable[[], _T], loop: asyncio.AbstractEventLoop) -> asyncio.Future[_T]:
        """Run `fn`, which may block, on a thread; its result or exception becomes the future's.

        Cancelling the future does not stop `fn`, whose result is then dropped. A loop that is closed
        meanwhile is no error. Call it in the loop's thread.
        """
        future: asyncio.Future[_T] = loop.create_future()
        self.run(outcome_of(fn, loop, future))
        return future

    def run(self, job: Job, *, later: bool = False) -> None:
        """Run `job` on a thread, at once where the limit allows; it must not raise.

        If it returns a callable, that is called once the thread is available again, so that a job started
        because of it needs no other thread.

        Args:
            job: to be run.
            later: where the pool has no threads, and the process gets none: `job` waits for the next one.

        Raises:
            RuntimeError: the same, without `later`.
        """
        with self._lock:
            if self._sleeping:
                # The last to become idle: its stack is still in the cache, and the others may end.
                waiter = self._sleeping.pop()
                waiter.job = job
                waiter.ready.release()
                return
            if self._threads >= self._limit:
                self._jobs.append(job)
                return
            if not self._registered:
                # A forked child has none of these threads and starts with an empty pool.
                self._registered = True
                os.register_at_fork(after_in_child=self._forget)
            self._threads += 1
            self._made += 1
            name = f"{self._name}-{self._made}"
            reap, self._reaping = not self._reaping, True
        try:
            _Waiter(self, job, name).start()
        except RuntimeError as error:  # the host has no thread left for this process
            self._missed(job, None if later else error, reap=reap)
            return
        if reap:
            try:
                threading.Thread(target=self._reap, name=f"{self._name}-idle", daemon=True).start()
            except RuntimeError:  # tried again with the next thread
                self._reaping = False

    def _missed(self, job: Job, error: RuntimeError | None, *, reap: bool) -> None:
        """Give `job`, for which no thread could be started, to the next idle thread.

        Raises:
            RuntimeError: `error`, if it is given and the pool has no threads.
        """
        with self._lock:
            self._threads -= 1
            self._reaping = self._reaping and not reap
            if not self._threads and error is not None:
                raise error
            if not self._sleeping:
                self._jobs.append(job)
                return
            waiter = self._sleeping.pop()
            waiter.job = job
            waiter.ready.release()

    def dismiss(self) -> None:
        """End the idle threads; new ones are started when needed."""
        with self._lock:
            idle, self._sleeping = self._sleeping, []
            self._threads -= len(idle)
        for waiter in idle:
            waiter.ready.release()  # without a job
        self._reap_now.set()

    def _reap(self) -> None:
        """End threads that were idle for long, until there are none.

        One thread does this for all: waiting for a lock with a timeout sets a timer each time, which costs an
        operation 5-10 µs on a virtual machine.
        """
        wake = self._reap_now  # a forked child has one of its own
        while True:
            wake.wait(self._idle_seconds)
            wake.clear()
            with self._lock:
                since = time.monotonic() - self._idle_seconds
                idle = [each for each in self._sleeping if each.since <= since]
                self._sleeping = [each for each in self._sleeping if each.since > since]
                self._threads -= len(idle)
                over = not self._threads
                if over:
                    self._reaping = False
            for waiter in idle:
                waiter.ready.release()  # without a job
            if over:
                return

    def comes_back(self, waiter: _Waiter) -> None:
        """Give `waiter` the next job, or make it idle. For the pool's own threads."""
        with self._lock:
            if self._jobs:
                waiter.job = self._jobs.popleft()
                waiter.ready.release()
            else:
                waiter.since = time.monotonic()
                self._sleeping.append(waiter)

    def next_job(self, waiter: _Waiter) -> Job | None:
        """Wait for the next job of `waiter`; None ends it. For the pool's own threads."""
        waiter.ready.acquire()
        return waiter.job


class _Waiter(threading.Thread):
    """One thread of a pool."""

    def __init__(self, owner: Pool, job: Job, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.job: Job | None = job
        # A plain lock is the cheapest thing to sleep on.
        self.ready = threading.Lock()
        self.ready.acquire()
        self.since = 0.0  # when it became idle
        self._owner = owner

    def run(self) -> None:
        job = self.job
        while job is not None:
            after = job()
            # Drop its references (a work, a tensor) while this thread is idle.
            self.job = job = None
            self._owner.comes_back(self)
            if after is not None:
                after()
                after = None
            job = self._owner.next_job(self)


pool = Pool()
"""The process's pool."""

ending = Pool(name="m8d-waiter-ending")
"""For what ends a world, or reports about it: that must not wait for the operations of others."""


class _Without:
    works: Container[object] = ()


def without_future(works: Container[object]) -> None:
    """Tell that these works are NCCL's: torch completes their futures when they are enqueued."""
    _Without.works = works


def raises_last(work: object) -> bool:
    """Whether waiting for `work` raises after its world's end, once nothing writes into its tensors."""
    return work in _Without.works


def future_of(work: Promising, loop: asyncio.AbstractEventLoop) -> asyncio.Future[object] | None:
    """Return a future of `loop` that is done when `work` is; None if the work has no future of its own.

    The result is what torch's future gives. Call it in the loop's thread.

    Args:
        work: a ``torch.distributed.Work``.
        loop: running.
    """
    if raises_last(work):
        return None
    try:
        torch_future = work.get_future()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    future: asyncio.Future[object] = loop.create_future()
    torch_future.add_done_callback(outcome_of(methodcaller("value"), loop, future))
    return future


def outcome_of(
    fn: Callable[..., _T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[_T]
) -> Callable[..., None]:
    """Return a job that calls `fn`, once, and sets its result or exception in `future`."""

    def job(*given: object) -> None:
        nonlocal fn, future
        try:
            result = fn(*given)
        except BaseException as error:  # set in the future
            fail(loop, future, error)
        else:
            # Raised where the loop was closed meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, future, result)
            del result
        # The error's traceback refers to this frame. References from the frame to the error, or to the future
        # that has it, would make a cycle that keeps works, tensors and groups of the callers' frames alive.
        del fn, future, given

    return job


def fail(loop: asyncio.AbstractEventLoop, future: asyncio.Future[_T], error: BaseException) -> None:
    """Give the future its error; in any thread."""
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
        loop.call_soon_threadsafe(_settle_failed, future, error)


def _settle(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():  # cancelled, most likely
        future.set_result(result)


def _settle_failed(future: asyncio.Future[_T], error: BaseException) -> None:
    if future.done():  # cancelled, most likely
        return
    if isinstance(error, StopIteration):  # no future takes it
        future.set_exception(RuntimeError("the operation raised StopIteration"))
    else:
        future.set_exception(error)
