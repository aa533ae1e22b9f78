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

    A thread that comes while another one tells leaves its steps to that one. It does not wait for it: that
    may be a subscriber's call, which waits for the close itself.

    Args:
        world: name, for the log.
    """

    def __init__(self, world: str) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._left: list[Step] = []
        self._broke = self._telling = False

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
        try:
            with self._lock:
                self._left += (step,)
        finally:
            self._tell()

    def _tell(self) -> None:
        mine = False
        try:
            with self._lock:
                if self._left and not self._telling:
                    # No call in between, after which Python looks for signals: these are one step.
                    self._telling = mine = True
            if mine:
                take_from(self._world, self._left, lambda step: step())
        finally:
            if mine:
                self._telling = False
                self._tell()  # what was left to this thread meanwhile
