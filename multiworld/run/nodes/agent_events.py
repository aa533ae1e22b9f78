"""Events of the other nodes, on their way to the agent's thread."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

from multiworld.run.events import Note, RunEvent

if TYPE_CHECKING:
    from multiworld.run.events import EventBus
    from multiworld.run.nodes.interface import NodeEvent

__all__ = ["AgentEvents"]


class AgentEvents:
    """See the module; `put` and `note` are for any thread, all else for the agent's.

    Args:
        bus: gets the events of the run, when the agent's thread polls.
    """

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._ready: deque[NodeEvent | RunEvent] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something."""
        return self._bell.fileno()

    def put(self, event: NodeEvent | RunEvent) -> None:
        """Add an event, and wake the agent's thread."""
        self._ready.append(event)
        with contextlib.suppress(BlockingIOError, OSError):
            self._ringer.send(b"!")

    def note(self, level: int, text: str) -> None:
        """Add a line for the log of the run."""
        self.put(Note(time.time(), level, text))

    def poll(self) -> list[NodeEvent]:
        """Publish the events of the run, and return those for the agent, since the last call."""
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        events: list[NodeEvent] = []
        while self._ready:
            each = self._ready.popleft()
            if isinstance(each, RunEvent):
                self._bus.publish(each)
            else:
                events.append(each)
        return events

    def close(self) -> None:
        """Close its descriptors."""
        self._bell.close()
        self._ringer.close()
