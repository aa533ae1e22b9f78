"""Progress of posted operations that no caller waits for: one thread in the process.

What is over soon after it was posted, as most are, costs no wake-up: while operations are posted the thread
looks every `LOOK_EVERY` seconds, and takes those on that are still under way; otherwise it sleeps.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import threading
from typing import TYPE_CHECKING, Protocol

from multiworld._core.lane.operations import Receive, Send
from multiworld._net.lane.awaiting import Watch
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from multiworld._net.lane.endpoint import Endpoint
    from multiworld._net.lane.waiting import Operation

__all__ = ["LOOK_EVERY", "Background", "Progressing", "background"]

_log = logger(__name__)

LOOK_EVERY = 0.002
"""Seconds until an operation that was posted is taken on."""

_QUIET = 25  # looks without a new operation, after which the thread sleeps
_IDLE = 1.0  # seconds of sleep, after which it ends


class Progressing(Protocol):
    """Something of several operations, which sees to them itself.

    Attributes:
        done: whether it is over.
    """

    done: bool

    async def progress(self, watch: Watch, /) -> None:
        """See to its operations until it is over, or return at once if another thread does; never raises."""


class Background:
    """The thread; it starts with the first operation, in a forked process with the first there."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._posted: collections.deque[tuple[Endpoint, Operation | Progressing]] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asleep = False
        self._watches: dict[Endpoint, Watch] = {}  # that are in use; each holds its endpoint
        self._users: collections.Counter[Endpoint] = collections.Counter()  # tasks that have its watch
        self._tasks: set[asyncio.Task[None]] = set()

    def take_on(self, endpoint: Endpoint, operation: Operation | Progressing) -> None:
        """See that an operation gets on, whether or not a caller waits for it."""
        self._posted.append((endpoint, operation))
        with self._lock:
            if self._loop is None:
                self._start()
            elif self._asleep:
                self._asleep = False
                self._loop.call_soon_threadsafe(self._look, 0)

    def _start(self) -> None:
        """Start the thread. If the process gets none, the next operation tries again.

        What was posted gets on where a caller waits for it: to raise would say that it was not posted.
        """
        _know_forks()
        try:
            loop = self._loop = asyncio.new_event_loop()
        except OSError as error:
            _log.warning("operations that no caller waits for stand still: %s", error)
            return
        try:
            threading.Thread(target=self._run, args=(loop,), daemon=True, name="m8d-lane").start()
        except RuntimeError as error:
            _log.warning("operations that no caller waits for stand still: %s", error)
            loop.close()
            self._loop = None

    def dismiss(self) -> None:
        """End the thread if it has nothing to do; another one is started when there is."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(self._look, 0)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _end(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop is self._loop and not (self._posted or self._tasks):
                loop.stop()
                self._loop, self._asleep = None, False

    def _look(self, quiet: int) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # it ends after this turn: what is posted now is the next one's
            return
        quiet = 0 if self._posted else quiet + 1
        for _ in range(len(self._posted)):
            endpoint, operation = self._posted.popleft()
            if not operation.done:
                task = loop.create_task(self._until_over(endpoint, operation))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        with self._lock:
            if quiet >= _QUIET and not self._posted:
                self._asleep = True
                loop.call_later(_IDLE, self._end)
                return
        loop.call_later(LOOK_EVERY, self._look, quiet)

    async def _until_over(self, endpoint: Endpoint, operation: Operation | Progressing) -> None:
        watch = self._watches.get(endpoint)
        if watch is None:
            watch = self._watches[endpoint] = Watch(endpoint, asyncio.get_running_loop())
        self._users[endpoint] += 1
        try:
            if isinstance(operation, Send | Receive):
                await watch.until_over(operation)
            else:
                await operation.progress(watch)
        finally:
            self._users[endpoint] -= 1
            # Also one that awaits nothing just now: a second watch would take its descriptors from it.
            if not self._users[endpoint]:
                del self._users[endpoint], self._watches[endpoint]


background = Background()
"""Of this process."""


def _forked() -> None:
    # The thread is the parent's, and so is its loop, which is left as it is: to close it would change the
    # parent's epoll, which is shared.
    background._clear()  # noqa: SLF001  (of this module)


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)
