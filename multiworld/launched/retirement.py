"""Retirement of a worker, asked for by its launcher: it leaves its worlds of a range."""

from __future__ import annotations

import threading

from multiworld._generation.background_release import releaser
from multiworld.errors import MultiworldError
from multiworld.events import Event, State, WorldActive, bus
from multiworld.logs.source import about, logger
from multiworld.world import worlds

__all__ = ["Retirement"]

_LOOK_EVERY = 0.5
"""Seconds between two looks at the worlds; one that becomes active is looked at at once."""

_log = logger(__name__)


class Retirement:
    """Whether this worker retires; once it does, each of its worlds of a range is left."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._news = threading.Event()

    @property
    def begun(self) -> bool:
        """Whether the launcher has asked for it."""
        return self._begun.is_set()

    def begin(self) -> None:
        """The launcher asks for it. Never blocks, harmless when repeated."""
        if self._begun.is_set():
            return
        self._begun.set()
        bus.subscribe(self._heard)
        # `World.leave` asks the store: not in the thread that hears the launcher, which says this once.
        if (again := self._start()) is not None:
            releaser.add(again, self._start)

    def _start(self) -> float | None:
        """Leave the worlds in a thread; return the seconds to the next try where the host has none left."""
        try:
            threading.Thread(target=self._leave, daemon=True, name="m8d-retire").start()
        except RuntimeError:
            return _LOOK_EVERY
        return None

    def _heard(self, event: Event) -> None:
        if isinstance(event, WorldActive):
            self._news.set()

    def _leave(self) -> None:
        """Leave the worlds, also those that are joined from now on, until the process ends."""
        asked = dict[str, int]()
        while True:
            for name, world in worlds().items():
                number, assigned = world.generation, world._plan.assigned  # noqa: SLF001  (joins make worlds)
                if not assigned or world.state is not State.ACTIVE or asked.get(name) == number:
                    continue
                try:
                    world.leave()
                    asked[name] = number
                except MultiworldError as error:  # it broke, or its store is silent: it is asked again
                    _log.info("world %r is not left yet: %s", name, error, extra=about(name))
            self._news.wait(_LOOK_EVERY)
            self._news.clear()
