"""Totals of the operations of this process's worlds, by name, over all their generations: they never go back.

Those of a generation are added to its world's when it ends. A world that was not joined again is forgotten
once `KEPT` others have ended after it; what it did stays in the sum of all that are forgotten.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING

from multiworld._core.operations.totals import Sums

if TYPE_CHECKING:
    from multiworld._core.operations.totals import Totals

__all__ = ["KEPT", "ProcessTotals", "process_totals"]

KEPT = 512
"""Names of worlds without a generation that are kept."""


class _World:
    """One name.

    Attributes:
        past: of the generations that are over.
        present: those of the others: one, or two while the next is prepared. Weak: one that was prepared and
            never entered may not be told to be over.
    """

    def __init__(self) -> None:
        self.past = Sums()
        self.present: weakref.WeakSet[Totals] = weakref.WeakSet()


class ProcessTotals:
    """See the module. Any thread."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal's handler may close a world in the middle
        self._worlds: dict[str, _World] = {}
        self._forgotten = Sums()
        self.reports = self.reports_failed = 0

    def begin(self, world: str, totals: Totals) -> None:
        """A generation of `world` begins."""
        _know_forks()
        with self._lock:
            self._worlds.setdefault(world, _World()).present.add(totals)

    def end(self, world: str, totals: Totals) -> None:
        """It is over; harmless when repeated."""
        if self._pid != os.getpid():  # a forked child lets go of worlds before this is cleared there
            return
        with self._lock:
            kept = self._worlds.get(world)
            if kept is None or totals not in kept.present:
                return
            kept.past += totals.sums()
            kept.present.discard(totals)
            # The last one to end stands last.
            self._worlds[world] = self._worlds.pop(world)
            over = [name for name, each in tuple(self._worlds.items()) if not each.present]
            for name in over[: max(0, len(over) - KEPT)]:
                self._forgotten += self._worlds.pop(name).past

    def reported(self, *, written: bool) -> None:
        """A report of a breakage was written, or could not be."""
        with self._lock:
            if written:
                self.reports += 1
            else:
                self.reports_failed += 1

    def sums(self) -> tuple[dict[str, Sums], Sums]:
        """Return the totals of each world that is known, and of all that are forgotten."""
        _know_forks()
        with self._lock:
            found = {
                name: sum((each.sums() for each in kept.present), kept.past)
                for name, kept in tuple(self._worlds.items())
            }
            return found, self._forgotten


process_totals = ProcessTotals()
"""Of this process."""


@functools.cache
def _know_forks() -> None:
    # Another thread of the parent may have held the lock; and what the parent did the child did not.
    os.register_at_fork(after_in_child=process_totals._clear)  # noqa: SLF001  (of this module)
