"""Blocking operations of several steps, which an exception of a signal's handler does not leave half done.

If Ctrl-C came between two steps, or in one of them, the other members would wait for the next one, and take
the bytes of a later operation for it. So another thread runs the steps, and the caller, which Ctrl-C or
another handler's exception reaches, waits for it. The turn lasts until the last step: what the caller calls
after its exception is posted behind it.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from multiworld._core.reraise import raised_by_the_program
from multiworld.turns import Turn, forget_own_turn, own_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiworld.turns import Turns, Way

__all__ = ["run", "stream_of_caller"]

_T = TypeVar("_T")
_LOOK = 0.2
"""Seconds between two looks for signals: one that the kernel gives to another thread wakes no waiter."""


def run(
    turns: Turns,
    ways: Sequence[Way],
    goes_on: Callable[[], bool],
    steps: Callable[[], _T],
    first: Callable[[], bool] | None = None,
    *,
    cut: Callable[[BaseException], object],
) -> _T:
    """Run the steps of an operation in its turn, to their end; return or raise what they do.

    Args:
        turns: of the world.
        ways: of the operation.
        goes_on: whether the world is active.
        steps: run in another thread if this is the main one, in which alone Python calls signals' handlers.
        first: a step before them that waits for no turn, that an exception takes back, and that returns True:
            the others follow then.
        cut: called with the exception of a signal's handler that left them half done, which happens where the
            process gets no other thread.

    Raises:
        RuntimeError: its turn cannot come while this thread waits.
    """
    if threading.current_thread() is not threading.main_thread():
        turn = Turn(turns.taken, ways)
        try:
            turn.wait(goes_on)
            with own_turn():
                if first is not None:
                    first()
                return steps()
        finally:
            turn.over()
    job = _Job(Turn(turns.taken, ways), steps)
    try:
        job.turn.wait(goes_on)
        job.hand_over()
        if first is not None:
            # Python looks for signals after a call; `for` stores what it is given before that.
            for job.committed in iter(first, None):
                break
        job.begin()
    except BaseException as error:
        if job.interrupted() and (not isinstance(error, Exception) or raised_by_the_program(error)):
            cut(error)
        raise
    return job.result()


class _Job(Generic[_T]):
    """The steps, on their way to another thread: that thread or the caller has them, and ends their turn.

    Attributes:
        turn: of the operation.
        committed: whether something has been done that the steps have to follow.
    """

    def __init__(self, turn: Turn, steps: Callable[[], _T]) -> None:
        self.turn, self.committed = turn, False
        self._claims = [steps]
        self._begins, self._over = threading.Lock(), threading.Lock()
        self._begins.acquire()
        self._over.acquire()
        self._context, self._stream = contextvars.copy_context(), stream_of_caller()
        self._here = self._begun = False
        self._results: list[_T] = []
        self._errors: list[BaseException] = []

    def hand_over(self) -> None:
        """Give the steps to another thread, which waits for `begin`; to this one if there is no other."""
        from multiworld._c10d.waiter_pool import pool  # noqa: PLC0415  (a world exists, so torch is loaded)

        try:
            pool.run(self._run)
        except RuntimeError:  # the process gets no other thread
            self._here = True

    def begin(self) -> None:
        """Have them run."""
        if not self._here:
            self._begins.release()
            self.turn.waits_in = None
            return
        self._begun = True
        with own_turn():
            self._results.append(self._claims[0]())
        self.turn.over()
        self._over.release()

    def interrupted(self) -> bool:
        """Have nothing of them run, unless they have begun or have to; their turn is over then.

        Returns whether they are left half done.
        """
        self.turn.waits_in = None  # what this thread calls next interrupts nothing
        if self._here:
            forget_own_turn()
            self.turn.over()
            return self._begun or self.committed
        if not self.committed:
            with contextlib.suppress(IndexError):  # the other thread has them
                self._claims.pop()
                self.turn.over()
        with contextlib.suppress(RuntimeError):  # it goes on already
            self._begins.release()
        return False

    def result(self) -> _T:
        """Wait for their end, which their own timeouts bound; return or raise what they do."""
        while not self._over.acquire(timeout=_LOOK):
            pass
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()

    def _run(self) -> None:
        self._begins.acquire()
        try:
            steps = self._claims.pop()
        except IndexError:  # given up
            return
        try:
            with own_turn(), self._stream():
                self._results.append(self._context.run(steps))
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            self._errors.append(error)
        finally:
            self.turn.over()
            self._over.release()


def stream_of_caller() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return what makes CUDA's current device and stream in another thread those of this one."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # Another thread may be importing torch: its modules have not all of their names yet.
    initialized = getattr(cuda, "is_initialized", None)
    if cuda is None or initialized is None or not initialized():
        return contextlib.nullcontext
    stream = cuda.current_stream()
    return lambda: cuda.stream(stream)
