"""Progress of posted operations that no caller waits for: one thread in the process.

What is over soon after it was posted, as most are, costs no wake-up: while operations are posted the thread
looks every `LOOK_EVERY` seconds, and takes those on that are still under way; otherwise it sleeps.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import weakref
from typing import TYPE_CHECKING

from multiworld._net.lane.awaiting import Watch

if TYPE_CHECKING:
    from multiworld._net.lane.endpoint import Endpoint, Operation

__all__ = ["LOOK_EVERY", "Background", "background"]

LOOK_EVERY = 0.002
"""Seconds until an operation that was posted is taken on."""

_QUIET = 25  # looks without a new operation, after which the thread sleeps


class Background:
    """The thread; it starts with the first operation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: collections.deque[tuple[Endpoint, Operation]] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asleep = False
        # Kept by their endpoints' keys: an endpoint that goes takes its watch along.
        self._watches: weakref.WeakKeyDictionary[Endpoint, Watch] = weakref.WeakKeyDictionary()
        self._tasks: set[asyncio.Task[bool]] = set()

    def take_on(self, endpoint: Endpoint, operation: Operation) -> None:
        """See that an operation gets on, whether or not a caller waits for it."""
        self._posted.append((endpoint, operation))
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), daemon=True, name="m8d-lane").start()
            elif self._asleep:
                self._asleep = False
                self._loop.call_soon_threadsafe(self._look, 0)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(self._look, 0)
        loop.run_forever()

    def _look(self, quiet: int) -> None:
        loop = asyncio.get_running_loop()
        quiet = 0 if self._posted else quiet + 1
        for _ in range(len(self._posted)):
            endpoint, operation = self._posted.popleft()
            if not operation.done:
                task = loop.create_task(self._watch(endpoint).until_over(operation))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        with self._lock:
            if quiet >= _QUIET and not self._posted:
                self._asleep = True
                return
        loop.call_later(LOOK_EVERY, self._look, quiet)

    def _watch(self, endpoint: Endpoint) -> Watch:
        watch = self._watches.get(endpoint)
        if watch is None:
            watch = self._watches[endpoint] = Watch(endpoint, asyncio.get_running_loop())
        return watch


background = Background()
"""Of this process."""
