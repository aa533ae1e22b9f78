"""Awaiting an operation of a lane: the event loop looks at the connection itself, for as long as it takes."""

from __future__ import annotations

import contextlib
import functools
import threading
from asyncio import _get_running_loop as _running_loop  # None where none runs, and no error, which would cost
from typing import TYPE_CHECKING

from multiworld._core.lane.operations import Send
from multiworld._net.lane import destroyed_tasks
from multiworld._net.lane.connections import Next

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from multiworld._net.lane.endpoint import Endpoint
    from multiworld._net.lane.waiting import Operation

__all__ = ["Watch"]

_abandoned = threading.Lock()  # held by who sees to a destroyed task: several may be at once


class Watch:
    """One event loop's eyes on the connections of an endpoint.

    Args:
        endpoint: see `Endpoint`.
        loop: the thread in which it runs makes all calls here.
    """

    def __init__(self, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._endpoint = endpoint
        self._awaited: set[asyncio.Future[None]] = set()  # of the operations that are
        self._waits: dict[int, int] = {}  # of each rank: those that need its connection
        self._descriptors: dict[int, int] = {}

    async def until_over(
        self, operation: Operation, timeout: float | None = None, *, everywhere: bool = False
    ) -> bool:
        """Wait until an operation is over; cancelled, it goes on.

        Args:
            operation: of the endpoint.
            timeout: seconds; None for no end.
            everywhere: whether to see to all connections meanwhile, not only to that of the operation.

        Returns:
            Whether it is over; False when the time ran out.
        """
        over: asyncio.Future[None] = self.loop.create_future()

        def tell() -> None:
            try:
                # A loop may be run on in another thread, and asleep there: its first one's id says nothing.
                if _running_loop() is self.loop:
                    _settle(over)
                else:
                    self.loop.call_soon_threadsafe(_settle, over)
            except RuntimeError:  # the loop is closed, and its tasks with it
                destroyed_tasks.run(functools.partial(_let_go, over))

        rank = operation.peer if isinstance(operation, Send) else operation.source
        if everywhere:
            rank = None
        ranks: list[int] = []
        timer: asyncio.TimerHandle | None = None
        begun, destroyed = True, False
        try:
            if not self._endpoint.when_over(operation, tell):
                begun = False
                return True
            if not self._awaited:
                self._endpoint.watch(self, self._blocked, self._reads)
            self._awaited.add(over)
            self._look(rank, ranks)
            if timeout is not None:
                timer = self.loop.call_later(timeout, _settle, over)
            await over
        except GeneratorExit:
            destroyed = self.loop.is_closed()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if destroyed:
                destroyed_tasks.run(functools.partial(self._leave_closed, operation, tell, over, ranks))
            elif begun:
                self._leave(operation, tell, over, ranks)
        return operation.done

    def give_up(self) -> None:
        """Let go of the tasks that await here, as the loop is closed: those that nothing else holds end.

        They would be kept until their operations are over, and their receives would take messages.
        """
        for over in list(self._awaited):  # not a tuple: see `Bus.publish`
            _let_go(over)

    def _leave(
        self, operation: Operation, tell: Callable[[], None], over: asyncio.Future[None], ranks: list[int]
    ) -> None:
        self._endpoint.forget(operation, tell)
        self._look_away(ranks)
        self._awaited.discard(over)
        if not self._awaited:
            self._endpoint.unwatch(self)

    def _leave_closed(
        self, operation: Operation, tell: Callable[[], None], over: asyncio.Future[None], ranks: list[int]
    ) -> None:
        with _abandoned:
            self._leave(operation, tell, over, ranks)

    def _look(self, rank: int | None, ranks: list[int]) -> None:
        """Look at connections; `ranks` gets those to be let go of, also where the loop takes not all."""
        held = self._endpoint.hold(rank)
        for each, _, _ in held:
            ranks.append(each)
            self._waits[each] = self._waits.get(each, 0) + 1
        for each, descriptor, awaits in held:
            if self._waits[each] == 1:
                self._descriptors[each] = descriptor
                self.loop.add_reader(descriptor, self._ready, each)
                if awaits is Next.WRITE:
                    self.loop.add_writer(descriptor, self._ready, each)

    def _look_away(self, ranks: list[int]) -> None:
        for each in ranks:
            self._waits[each] -= 1
            if not self._waits[each]:
                del self._waits[each]
                self._ignore(each)
            self._endpoint.let_go(each)

    def _ignore(self, rank: int) -> None:
        descriptor = self._descriptors.pop(rank, None)
        if descriptor is not None and not self.loop.is_closed():
            self.loop.remove_reader(descriptor)
            self.loop.remove_writer(descriptor)

    def _ready(self, rank: int) -> None:
        self._adapt(rank, self._endpoint.ready(rank))

    def _adapt(self, rank: int, after: Next) -> None:
        descriptor = self._descriptors.get(rank)
        if descriptor is None:
            return
        if after is Next.WRITE:
            self.loop.add_writer(descriptor, self._ready, rank)
        elif after is Next.READ:
            self.loop.remove_writer(descriptor)
        else:
            self._ignore(rank)

    def _blocked(self, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
            self.loop.call_soon_threadsafe(self._adapt, rank, Next.WRITE)

    def _reads(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
            self.loop.call_soon_threadsafe(self._read_on)

    def _read_on(self) -> None:
        if self._awaited:
            self._endpoint.read_on()


def _settle(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


def _let_go(over: asyncio.Future[None]) -> None:
    """Have `over`, of a closed loop, hold its task no more: it ends here unless something else holds it."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, so the task is not told, only forgotten
        over.cancel()
