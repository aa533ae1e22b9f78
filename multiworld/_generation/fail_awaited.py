"""The operations of one generation that tasks await: those that its end leaves waiting are failed.

gloo can lose a send whose connection breaks in the very moment of writing: its work then ends at the
operation's timeout only.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

from multiworld.events import State

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from multiworld._generation.stage import StateMachine

__all__ = ["AwaitedOperations"]

_T = TypeVar("_T")

CUT_GRACE = 0.5
"""Seconds after a breakage in which awaited operations end by themselves; what then still waits is failed."""


class Awaited(Protocol):
    """A future of asyncio's, or a `multiworld._c10d.gloo.await_work.AwaitedWork`."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop it belongs to."""

    def done(self) -> bool:
        """Whether it is waited for no more."""

    def set_exception(self, error: BaseException, /) -> None:
        """End the waiting."""


class AwaitedOperations:
    """The awaited operations of one generation.

    Args:
        machine: of the generation.
        error: makes what an operation raises when the generation is over.
    """

    def __init__(self, machine: StateMachine, error: Callable[[], Exception]) -> None:
        self._machine = machine
        self._error = error
        self._pending: set[Awaited] = set()
        self._timer: threading.Timer | None = None

    def watch(self, future: asyncio.Future[_T]) -> None:
        """Fail `future`, of the running loop, some time after the generation broke, if nothing else has."""
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if self._machine.state is not State.ACTIVE:
            self.fail_later()

    def expect(self, work: Awaited) -> None:
        """`watch`, for an operation whose awaiter says itself when it is over (`expect_no_more`)."""
        self._pending.add(work)
        if self._machine.state is not State.ACTIVE:
            self.fail_later()

    def expect_no_more(self, work: Awaited) -> None:
        """It is over, or no task waits for it."""
        self._pending.discard(work)

    def fail_later(self) -> None:
        """Fail what still waits in `CUT_GRACE` seconds; nothing where nothing waits."""
        if not self._pending:
            return
        timer = self._timer = threading.Timer(CUT_GRACE, self._fail)
        timer.daemon = True
        timer.name = f"m8d-cut-{self._machine.world}"
        try:
            timer.start()
        except RuntimeError:  # the host has no thread left for this process
            self._fail()

    def fail(self) -> None:
        """Fail what still waits, now."""
        if self._timer is not None:
            self._timer.cancel()
        self._fail()

    def _fail(self) -> None:
        for future in list(self._pending):  # not a tuple: see `Bus.publish`
            with contextlib.suppress(RuntimeError):  # its loop is closed: no task waits
                future.get_loop().call_soon_threadsafe(_set_exception, future, self._error())

    def disown(self) -> object:
        """In a forked child: return what the parent awaits, for the caller to keep."""
        kept, self._pending = self._pending, set()
        return kept


def _set_exception(future: Awaited, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
