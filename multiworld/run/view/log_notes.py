"""`NoteHandler`: what multiworld's loggers say in the launcher becomes notes of the run."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from multiworld import settings
from multiworld.errors import MultiworldError
from multiworld.logs.handler import attach, level_named
from multiworld.run.errors import ArgumentsError
from multiworld.run.events import Note

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.run.events import EventBus

__all__ = ["NoteHandler", "take_notes"]


class NoteHandler(logging.Handler):
    """A handler of logging that publishes each record as a `Note`.

    Args:
        bus: of the run.
    """

    def __init__(self, bus: EventBus) -> None:
        super().__init__()
        self._bus = bus
        self._inside = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        """Publish a note; not of what is said while one is published, by the bus itself."""
        if getattr(self._inside, "now", False):
            return
        self._inside.now = True
        try:
            self._bus.publish(Note(record.created, record.levelno, self.format(record)))
        finally:
            self._inside.now = False


def take_notes(bus: EventBus) -> Callable[[], None]:
    """Publish what multiworld's loggers say, from M8D_LOG_LEVEL on (WARNING); return what ends it.

    Raises:
        ArgumentsError: M8D_LOG_LEVEL has an unknown value.
    """
    try:
        least = level_named("M8D_LOG_LEVEL=", settings.environment("M8D_LOG_LEVEL") or "WARNING")
    except MultiworldError as error:
        raise ArgumentsError(error.value, rule=error.rule or "", next_step=error.next_step or "") from error
    return attach(least, NoteHandler(bus))
