"""Awaiting gloo's collectives: a thread of the pool waits for each, and the loop's thread naps meanwhile.

- A thread waits (`waiter_pool.pool`). Where nothing else is to be done (no other operation is
  under way on this loop, no callback is ready), the loop's thread naps until that thread is back, for up to
  `NAP`. That saves waking the loop through its socket, and two of its turns. It stops where that has not paid
  (`Habit`).
- Else the thread wakes the loop once for all operations that have ended by then (`LoopQueue`), and each task
  goes on within that turn, not in the next one.
- After `_TURN` operations at most that have ended without a turn of the loop it gets one.

Measured on 2 shared cores, 4 bytes, loopback, blocking `torch.distributed` = 1, medians: a future of asyncio
and its shield 4.7-5.9; a thread for each operation 1.96, and naps 1.55-1.66.

Looking instead of napping (a flag, or the last bytes of the tensor, letting go of the GIL and the core with
each look) has a better median, 1.8 for the flag and 0.65-1.1 for the bytes, and a mean of 2 to 3: polling
takes a core from the others, and gloo's thread, which polls as long as the thread that posts an operation
holds its lock, then polls until that one's turn comes, 4 ms later.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from _thread import LockType, allocate_lock
from collections import deque
from typing import TYPE_CHECKING

from multiworld._c10d.nccl import inflight
from multiworld._c10d.waiter_pool import pool

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sized

    from torch._C._distributed_c10d import Work
    from torch.futures import Future

__all__ = ["AwaitedWork", "Habit", "LoopQueue", "queue_of"]

NAP = 0.00025
"""Seconds that the loop's thread naps at most: some more than two messages of 4 bytes take."""

_TURN = 10
"""Operations that may end in a row without a turn of the loop: its other tasks wait for 4 ms of naps at
most."""

_CREDIT = 8
"""Naps that may be in vain before fewer are taken; each that is not gives one back."""

_MOST = 64
"""Operations at most without a nap after one that was in vain."""

_NOTHING: tuple[()] = ()
_wait = inflight.plain_wait


class Habit:
    """Whether napping pays, learned from the operations of one kind (a world's sends, say).

    As long as most of them end meanwhile, there is a nap for each; once they do not, for ever fewer.
    """

    __slots__ = ("_credit", "_skip")

    def __init__(self) -> None:
        self._credit, self._skip = _CREDIT, 0

    def naps(self) -> bool:
        """Whether to nap for the next operation."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def learn(self, hit: bool) -> None:
        """There was a nap, and the operation ended meanwhile or not."""
        if hit:
            self._credit = min(_CREDIT, max(0, self._credit) + 1)
        else:
            self._credit -= 1
            if self._credit < 0:
                self._skip = min(_MOST, 1 << -self._credit)
                self._credit = max(self._credit, -6)


class LoopQueue:
    """What the operations on one event loop share: one wake-up of it for all that have ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # It must not hold the loop: the loop's entry in `_queues` would never go.
        self.loop = weakref.ref(loop)
        self.ready: Sized = getattr(loop, "_ready", _NOTHING)
        self.pending = 0
        # Of the callbacks that are ready: asyncio's own, which empties the socket that this queue woke it by.
        self.spare = 0
        self.in_a_row = 0
        self._ended: deque[AwaitedWork] = deque()
        self._woken = False

    def turn(self) -> bool:
        """An operation ended without a turn of the loop; whether one is due."""
        self.in_a_row += 1
        if self.in_a_row < _TURN:
            return False
        self.in_a_row = 0
        return True

    def ended(self, ending: AwaitedWork, loop: asyncio.AbstractEventLoop) -> None:
        """From the thread that waited: `ending` has ended, and the loop's thread does not nap for it."""
        self._ended.append(ending)
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop was closed meanwhile
                self._ended.clear()
                self._woken = False

    def _drain(self) -> None:
        # First: an operation that is added from now on wakes the loop again.
        self._woken = False
        self.in_a_row = 0
        ended = self._ended
        self.spare = 1
        try:
            # Those that were there: what ends meanwhile is the next turn's, or no other callback would get
            # one.
            for _ in range(len(ended)):
                ended.popleft().step()
        finally:
            self.spare = 0
            if ended and not self._woken:
                self._woken = True
                asyncio.get_running_loop().call_soon(self._drain)


_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopQueue] = weakref.WeakKeyDictionary()


def queue_of(loop: asyncio.AbstractEventLoop) -> LoopQueue:
    """Return the queue of a loop; call it in the loop's thread."""
    queue = _queues.get(loop)
    if queue is None:
        queue = _queues[loop] = LoopQueue(loop)
    return queue


class AwaitedWork:
    """The end of one work of gloo's, for one task to await, once.

    To asyncio it is a future: it has what a task asks of one, and no more. Cancelling it ends the waiting
    only.

    Args:
        work: torch's; let go of as soon as it has ended.
        queue: of the running loop.
        loop: the running loop.
    """

    # Most never get a value of their own, so these are cheaper than slots.
    _asyncio_future_blocking = False
    _done = False  # for the task: its end, a cancellation, or the end of the world
    _cancelled = False
    _back: LockType | None = None  # released by the thread, where the loop's naps
    _error: BaseException | None = None  # torch's
    _told: BaseException | None = None  # what ended the waiting, though the operation has not ended
    _message: object = None  # of a cancellation
    _callback: Callable[[AwaitedWork], object] | None = None
    _context: contextvars.Context | None = None

    def __init__(self, work: Work, queue: LoopQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._work: Work | None = work
        self._queue = queue
        self._loop = loop

    async def until_over(self, habit: Habit) -> None:
        """Wait until the operation has ended.

        Args:
            habit: of its world.

        Raises:
            Exception: what torch raised, or what `set_exception` was given.
            asyncio.CancelledError: the task was cancelled; the operation goes on.
        """
        queue = self._queue
        # Whether this is the only one, and nothing else is to be done in this turn.
        naps = not (self._done or queue.pending) and len(queue.ready) <= queue.spare and habit.naps()
        queue.pending += 1
        try:
            if naps:
                habit.learn(self._nap(NAP))
            elif not self._done:
                self._start()
            if self._done and queue.turn():
                await asyncio.sleep(0)
            if not self._done:  # it cannot end unseen: from here on the thread wakes the loop
                await self
            if self._told is not None or self._error is not None:
                raise self._taken()
        finally:
            queue.pending -= 1

    def _nap(self, seconds: float) -> bool:
        back = self._back = allocate_lock()
        back.acquire()
        try:
            self._start()
            return back.acquire(True, seconds)
        finally:
            self._back = None  # the thread that has not seen it finds the task, or wakes the loop

    def _start(self) -> None:
        try:
            pool.run(self._run)
        except RuntimeError:  # the process gets no thread: torch's own tells then
            assert self._work is not None  # noqa: S101  (it is waited for once)
            self._work.get_future().add_done_callback(self._told_by_torch)

    def _taken(self) -> BaseException:
        # Who raises it is in its traceback, and must not hold it.
        error, self._told, self._error = self._told or self._error, None, None
        assert error is not None  # noqa: S101  (it was asked before)
        return error

    # -- in the thread that waits ----------------------------------------------------------------------------

    def _told_by_torch(self, future: Future[object]) -> None:
        try:
            future.value()
        except BaseException as error:  # it is the awaiting task's
            self._error = error.with_traceback(None)
        self._end()

    def _run(self) -> Callable[[], None]:
        assert self._work is not None  # noqa: S101  (it is waited for once)
        try:
            _wait(self._work)
        except BaseException as error:  # it is the awaiting task's
            self._error = error.with_traceback(None)  # this frame, which holds what holds the error
            self._work = None  # who keeps the error need not keep gloo's device
        return self._end

    def _end(self) -> None:
        if not self._done:  # neither cancelled, nor told that the world is over
            self._done = True
            back = self._back
            if back is None:
                self._queue.ended(self, self._loop)
            else:
                back.release()
        # Last: it is destroyed without the GIL, and the loop's thread takes that.
        self._work = None

    # -- in the loop's thread --------------------------------------------------------------------------------

    def step(self) -> None:
        """Let the task go on, now."""
        callback, self._callback = self._callback, None
        if callback is not None:
            assert self._context is not None  # noqa: S101  (it comes with the callback)
            self._context.run(callback, self)

    def set_exception(self, error: BaseException) -> None:
        """End the waiting, though the operation has not ended."""
        if not self._done:
            self._done = True
            self._told = error
            self.step()

    # -- what asyncio asks of a future -----------------------------------------------------------------------

    def __await__(self) -> Generator[AwaitedWork, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop it belongs to."""
        return self._loop

    def add_done_callback(
        self, callback: Callable[[AwaitedWork], object], *, context: contextvars.Context | None = None
    ) -> None:
        """What lets the task go on; there is one."""
        # An empty context is false, and still the task's own.
        self._callback = callback
        self._context = contextvars.copy_context() if context is None else context

    def remove_done_callback(self, callback: Callable[[AwaitedWork], object]) -> int:
        """Take it back."""
        found = self._callback is not None and self._callback == callback
        if found:
            self._callback = None
        return int(found)

    def cancel(self, msg: object = None) -> bool:
        """End the waiting of the task, in the loop's next turn; False if it has ended."""
        if self._done:
            return False
        self._done = self._cancelled = True
        self._message = msg  # by which anyio knows its own
        self._loop.call_soon(self.step)
        return True

    def done(self) -> bool:
        """Whether the task needs to wait no more."""
        return self._done

    def cancelled(self) -> bool:
        """Whether the waiting was cancelled."""
        return self._cancelled

    def result(self) -> None:
        """For the task that goes on; an error is raised by `until_over`."""
        if self._cancelled:
            raise asyncio.CancelledError(*(() if self._message is None else (self._message,)))

    def exception(self) -> BaseException | None:
        """None: an error is raised by `until_over`."""
        return None
