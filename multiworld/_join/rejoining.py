"""`Rejoiner`: joins a broken world again, in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from multiworld.errors import (
    InvalidJoinError,
    JoinTimeoutError,
    MultiworldError,
    StaleGenerationError,
    WorldClosedError,
)
from multiworld.events import Cause, State
from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.world import World

__all__ = ["Rejoiner"]

AGAIN, AGAIN_AT_MOST = 0.05, 0.25
"""Seconds between two tries: the first pause, and what pauses grow to. Most tries last until the join's
timeout."""
_LONG = 1.0
_LOOK_EVERY = 0.5

_log = logger(__name__)


class Rejoiner:
    """Joins one world again whenever it breaks, until it is closed.

    Args:
        world: active.
        again: joins it again; gets it, and a function that says whether the program has closed it since.

    Attributes:
        world: as given.
    """

    def __init__(self, world: World, again: Callable[[World, Callable[[], bool]], object]) -> None:
        self.world = world
        self._again = again
        self._busy = threading.Lock()
        world.on_break(self._broke)

    def wait_idle(self, timeout: float) -> None:
        """Wait until no join is under way; that of a world that was closed is given up soon."""
        if self._busy.acquire(timeout=timeout):
            self._busy.release()

    def _broke(self, world: World) -> None:
        """Rejoin, on the thread of one breakage; those of later ones leave it to this one."""
        while world.state in {State.BROKEN, State.JOINING}:
            if not self._busy.acquire(blocking=False):
                return  # the thread that holds the lock checks again before it ends
            try:
                if not self._rejoin():
                    return
            finally:
                self._busy.release()

    def _rejoin(self) -> bool:
        """Join until the world is active; False if it was closed, or its generation is stale."""
        world, told, pause = self.world, set[str](), AGAIN
        while True:
            closes = world._closes  # a close() by the program after this wins
            state = world.state
            if state is State.ACTIVE:
                return True
            if state is State.CLOSED:
                return False
            if state is State.JOINING:  # by the program itself
                with contextlib.suppress(JoinTimeoutError, WorldClosedError):
                    world.wait_active(_LOOK_EVERY)
                continue
            began = time.monotonic()
            try:
                self._join(closes)
            except InvalidJoinError as exc:
                # The program has joined it already, or ends.
                _log.debug("world %r: %s", world.name, exc)
            except StaleGenerationError as exc:
                _log.warning("world %r is not joined again: %s", world.name, exc, extra=about(world.name))
                return False
            except Exception as exc:  # noqa: BLE001  (logged; the host may have no thread or descriptor left now)
                if type(exc).__name__ not in told and world.state is not State.CLOSED:
                    told.add(type(exc).__name__)
                    # A member that left in good order may be done, and never come back.
                    left = world.breakage is not None and world.breakage.cause is Cause.LEFT
                    level = logging.INFO if left else logging.WARNING
                    trace = None if isinstance(exc, MultiworldError) else exc
                    _log.log(level, "world %r is not joined again yet: %s", world.name, exc, exc_info=trace)
            else:
                return True
            time.sleep(pause)
            pause = AGAIN if time.monotonic() - began > _LONG else min(AGAIN_AT_MOST, 2 * pause)

    def _join(self, closes: int) -> None:
        world = self.world

        def closed() -> bool:
            return world._closes != closes  # a close() by the program wins

        self._again(world, closed)
        if closed():  # before the join began, or in its last moment
            world.close()
