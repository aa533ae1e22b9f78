"""Calls with a deadline of functions that may never return, in threads that are abandoned then."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from multiworld.errors import JoinAbandonedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NoAnswerError", "NoThreadError", "in_time"]

T = TypeVar("T")

_LOOK_EVERY = 0.1  # seconds
_STALL = 0.2  # seconds between two checks


class NoAnswerError(Exception):
    """The function did not return in time; its thread lives on until it does.

    Args:
        seconds: that it was given.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"no answer for {seconds:.1f} s")


class NoThreadError(NoAnswerError):
    """The function was not called: the host has no thread left, or the interpreter is ending.

    Args:
        why: Python's words.
    """

    def __init__(self, why: str) -> None:
        super().__init__(0.0)
        self.args = (f"no answer, as it was not asked: {why}",)
        self._why = why

    def abandoned(self, world: str) -> JoinAbandonedError:
        """Return the error of a join that cannot ask its store."""
        return JoinAbandonedError(
            world,
            f"The store of world {world!r} was not asked: {self._why}",
            rule="A join runs in threads",
            next_step="See how many this process may have (ulimit -u), then join again",
        )


def in_time(
    function: Callable[[], T],
    *,
    deadline: float,
    clock: Callable[[], float],
    hurry: Callable[[], bool],
    give_up: Callable[[], None],
    parting: float,
    last_words: float,
) -> T:
    """Return what `function` returns, or raise what it raises.

    Args:
        function: called in a daemon thread.
        deadline: by `clock`; when it has passed, `NoAnswerError` is raised. Without a thread it is a
            `NoThreadError`.
        clock: monotonic seconds.
        hurry: asked every 0.1 s; when it says so, `function` has only `parting` seconds more.
        give_up: called before this raises while `function` still runs, to let it know.
        parting: see `hurry`; it has as many seconds where this process stood still when the deadline passed,
            for it stood still as well.
        last_words: seconds that it still has if this thread is interrupted: often the process ends then.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()
    begun = threading.Lock()  # taken by the thread when it begins, or by this one so that it never does

    def work() -> None:
        if not begun.acquire(blocking=False):
            return
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
            errors.append(error)
        finally:
            done.set()

    began = seen = clock()
    refused: RuntimeError | None = None
    try:
        # Starting it is a wait as well, while `function` runs already.
        try:
            threading.Thread(target=work, name="m8d-rendezvous", daemon=True).start()
        except RuntimeError as error:  # the interpreter is ending, or the host has no thread left
            refused = error
            done.set()
        while (now := clock()) < deadline and not done.wait(min(_LOOK_EVERY, deadline - now)):
            seen = now
            if hurry():
                deadline = min(deadline, clock() + parting)
        if clock() - seen > _STALL:
            _wait(done, parting)
    except BaseException:  # interrupted
        give_up()
        if not begun.acquire(blocking=False):
            _wait(done, last_words)
        raise
    if refused is not None:
        raise NoThreadError(str(refused)) from refused
    if not done.is_set():
        give_up()
        raise NoAnswerError(clock() - began)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback refers to this frame: a cycle would keep the caller's store alive
    return outcome[0]


def _wait(done: threading.Event, seconds: float) -> None:
    """Wait in short steps, so that a stall of this process counts as one of them."""
    for _ in range(max(1, round(seconds / _LOOK_EVERY))):
        if done.wait(_LOOK_EVERY):
            return
