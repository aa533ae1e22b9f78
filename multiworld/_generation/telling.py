"""The order in which a generation's end is told: that it broke, once, and that it was closed, after that.

Several threads end it: one is still at the log, or at the abort, when another has caught the error of its
operation, and closes the world. Subscribers that heard of the close first would have it broken for good.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from multiworld._generation.every_step import take_from

if TYPE_CHECKING:
    from multiworld._generation.every_step import Step

__all__ = ["Telling"]


class Telling:
    """The steps in which one generation's end is told; each is taken once, and one at a time.

    A thread that comes while another one tells leaves its steps to that one. `settle` waits for it, and not
    for long: it may be in a subscriber, which waits for the close itself.

    Args:
        world: name, for the log.
    """

    def __init__(self, world: str) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._left: list[Step] = []
        self._broke = False
        self._teller = 0  # the thread that tells; 0: none
        self._settled = threading.Event()
        self._settled.set()

    def broke(self, *steps: Step) -> None:
        """Tell with these steps that it broke; nothing where another thread has begun to.

        Raises:
            BaseException: what a step raised first, when all are taken.
        """
        try:
            with self._lock:
                if not self._broke:
                    self._broke = True
                    self._left += steps
        finally:
            self._tell()

    def closed(self, step: Step) -> None:
        """Tell with this step that it was closed, perhaps after the return.

        Raises:
            BaseException: as of `broke`.
        """

        def tell() -> None:
            try:
                step()
            finally:
                self._settled.set()

        try:
            with self._lock:
                self._left += (tell,)
                self._settled.clear()
        finally:
            self._tell()

    def settle(self, seconds: float) -> None:
        """Wait until a thread that has the step of `closed` has taken it, for so long at most."""
        if self._teller != threading.get_ident():
            self._settled.wait(seconds)

    def _tell(self) -> None:
        me, mine = threading.get_ident(), 0
        try:
            with self._lock:
                if self._left and not self._teller:
                    # No call in between, after which Python looks for signals: these are one step.
                    self._teller = mine = me
            if mine:
                take_from(self._world, self._left, lambda step: step())
        finally:
            if mine:
                self._teller = 0
                self._tell()  # what was left to this thread meanwhile
