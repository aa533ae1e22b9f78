"""pymultiworld's WatchDog: broken worlds' names, handed to an asyncio queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from multiworld.events import Event, WorldBroken, bus

if TYPE_CHECKING:
    from queue import Queue

__all__ = ["WatchDog"]


class WatchDog:
    """Puts the name of every world that breaks into `action_q`, as pymultiworld 0.2.x's does.

    `multiworld.watchdog.Watchdog` detects the faults of all worlds without being asked; this only passes them
    on. It sends no signals and ends no process.

    Args:
        event_q: kept for programs that pass it; worlds need not be announced.
        action_q: gets a name per breakage, in the loop that runs where this is made.
    """

    def __init__(self, event_q: Queue[Any] | None, action_q: asyncio.Queue[str]) -> None:
        self.event_q = event_q
        self._action_q = action_q
        self._loop = asyncio.get_running_loop()
        self._puts: set[asyncio.Task[None]] = set()
        self._stop = bus.subscribe(self._saw)

    def close(self) -> None:
        """Pass nothing on any more."""
        self._stop()

    def _saw(self, event: Event) -> None:
        if isinstance(event, WorldBroken):
            try:
                self._loop.call_soon_threadsafe(self._put, event.world)
            except RuntimeError:  # the loop is closed: the queue has no reader
                self.close()

    def _put(self, name: str) -> None:
        # A queue with a limit may be full: its reader gets the name when there is room.
        task = self._loop.create_task(self._action_q.put(name))
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)
