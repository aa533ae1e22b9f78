"""Simulated time: a heap of what happens when, and threads of which one at a time runs in it."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 60.0
"""Seconds of real time that a task may compute between two waits: more is a defect of the simulation."""


class Loop:
    """Events in the order of their times; those of one time in the order in which they were scheduled.

    Args:
        seed: of `random`, from which all chance is drawn.

    Attributes:
        now: simulated seconds.
        random: for everyone.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)  # noqa: S311  (repeatable, not secret)
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Call at that time; now, if it is over. What is to happen never has no event."""
        if when < math.inf:
            heapq.heappush(self._heap, (max(when, self.now), next(self._count), call))

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call in so many seconds."""
        self.at(self.now + seconds, call)

    def run(self, until: float = math.inf, done: Callable[[], bool] = lambda: False) -> None:
        """Let things happen until that time, or until `done`, asked after each of them."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call = heapq.heappop(heap)
            call()
            if done():
                return
        if until < math.inf:
            self.now = until


class Task:
    """A function in a thread of its own, which waits in simulated time.

    The loop waits while it runs, so that one at a time does. Code that blocks, as a rendezvous does, runs
    unchanged.

    Attributes:
        done: whether it has returned.
        error: what it raised.
    """

    def __init__(self, loop: Loop, function: Callable[[Task], object], start: float = 0.0) -> None:
        self.loop = loop
        self.done = False
        self.error: BaseException | None = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._parked = 0
        thread = threading.Thread(target=self._main, args=(function,), daemon=True)
        thread.start()
        loop.at(start, self._resume)

    def sleep(self, seconds: float) -> None:
        """In the task: wait."""
        self.loop.after(seconds, self._resume)
        self._yield()

    def wait(self, begin: Callable[[Callable[[], None]], object], within: float = math.inf) -> bool:
        """In the task: begin something and wait until it calls what it was given; False after `within` s."""
        self._parked += 1
        place, came = self._parked, []

        def go_on(*, late: bool) -> None:
            if self._parked == place:
                self._parked += 1
                came.append(not late)
                self._resume()

        begin(lambda: go_on(late=False))
        self.loop.after(within, lambda: go_on(late=True))
        self._yield()
        return came[0]

    def _main(self, function: Callable[[Task], object]) -> None:
        self._turn.acquire()
        try:
            function(self)
        except BaseException as error:  # noqa: BLE001  (its owner looks at it)
            self.error = error
        self.done = True
        self._back.release()

    def _yield(self) -> None:
        self._back.release()
        self._turn.acquire()

    def _resume(self) -> None:
        self._turn.release()
        if not self._back.acquire(timeout=PATIENCE):
            raise RuntimeError(f"a task computed for more than {PATIENCE:g} s between two waits")
