"""Background release of broken worlds: a program need not close them.

A few daemon threads, which exist only while there are steps, take one step after the other. A step that hangs
(an abort of NCCL) holds up one of them for as long as the step allows itself, and no watchdog.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], float | None]

__all__ = ["THREADS", "Releaser", "releaser"]

THREADS = 4
"""At most: so many steps can hang at a time without holding up the next one."""

_log = logger(__name__)


class Releaser:
    """Takes steps when they are due; see the module.

    Args:
        threads: at most.
        clock: monotonic seconds.
    """

    def __init__(self, *, threads: int = THREADS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = threads
        self._clock = clock
        self._registered = False
        self._forget()

    def _forget(self) -> None:
        self._due: list[tuple[float, int, Step]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition(threading.Lock())
        self._threads = 0
        self._taking = 0  # threads that are in a step, which may hang
        self._stopped = False

    @property
    def threads(self) -> int:
        """How many threads there are."""
        return self._threads

    def add(self, delay: float, step: Step) -> None:
        """Call `step` on a thread after `delay` seconds, and again after what it returns; None: no more."""
        with self._changed:
            if not self._registered:
                # Its threads do not live in a forked child, nor is what they would free the child's.
                self._registered = True
                os.register_at_fork(after_in_child=self._forget)
            self._stopped = False
            heapq.heappush(self._due, (self._clock() + delay, next(self._numbers), step))
            self._changed.notify()
            start = self._threads < min(self._limit, self._taking + len(self._due))
            self._threads += start
        if start:
            try:
                threading.Thread(target=self._run, name="m8d-free", daemon=True).start()
            except RuntimeError:  # the host has no thread left for this process: with the next one, then
                with self._changed:
                    self._threads -= 1

    def stop(self, deadline: float) -> bool:
        """Take no more of the steps there are, and wait for those that are being taken.

        When the interpreter ends, a daemon thread that is in torch must not come back from there: the
        thread is then ended inside a C++ destructor, which ends the process by SIGABRT.

        Args:
            deadline: seconds of the clock.

        Returns:
            Whether no thread was left at the deadline.
        """
        with self._changed:
            self._stopped = True
            self._due.clear()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._threads, max(0.0, deadline - self._clock()))

    def _run(self) -> None:
        while (step := self._next()) is not None:
            delay: float | None = None
            try:
                delay = step()
            except Exception:  # noqa: BLE001  (logged: the next step has its turn all the same)
                _log.exception("a broken world could not be freed")
            with self._changed:
                self._taking -= 1
                if delay is not None and not self._stopped:
                    heapq.heappush(self._due, (self._clock() + delay, next(self._numbers), step))

    def _next(self) -> Step | None:
        """Wait for the next step that is due; None where there is none any more: the thread ends."""
        with self._changed:
            while self._due:
                left = self._due[0][0] - self._clock()
                if left <= 0:
                    self._taking += 1
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
            self._threads -= 1
            self._changed.notify_all()
            return None


releaser = Releaser()
"""The process's own."""
