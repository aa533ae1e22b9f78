"""Worlds that broke, joined again in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from multiworld import joining
from multiworld.errors import (
    InvalidJoinError,
    JoinTimeoutError,
    MultiworldError,
    StaleGenerationError,
    WorldClosedError,
)
from multiworld.events import Cause, State

if TYPE_CHECKING:
    from multiworld.joinall.launcher import Link
    from multiworld.world import World

__all__ = ["Healer"]

ASKING = 2.0
"""Seconds that the launcher has to say where its store is; else it is where it was."""
AGAIN, AGAIN_AT_MOST = 0.05, 0.25
"""Seconds between two tries: the first pause, and what pauses grow to. Most tries last until the join's timeout."""
_LONG = 1.0
_LOOK_EVERY = 0.5

_log = logging.getLogger(__name__)


class Healer:
    """Joins one world again whenever it breaks, until it is closed.

    Args:
        world: active.
        link: to the launcher, which knows where the members meet.

    Attributes:
        world: as given.
    """

    def __init__(self, world: World, link: Link) -> None:
        self.world = world
        self._link = link
        self._busy = threading.Lock()
        world.on_break(self._broke)

    def wait_idle(self, timeout: float) -> None:
        """Wait until no join is under way here, if the world was closed: it is given up soon."""
        if self._busy.acquire(timeout=timeout):
            self._busy.release()

    def _broke(self, world: World) -> None:
        """In a thread of its own, for each breakage; one of them works."""
        while world.state in {State.BROKEN, State.JOINING}:
            if not self._busy.acquire(blocking=False):
                return  # who has it looks again before it ends
            try:
                if not self._heal():
                    return
            finally:
                self._busy.release()

    def _heal(self) -> bool:
        """Join until the world is active; False where nothing more is to be done for it."""
        world, told, pause = self.world, set[str](), AGAIN
        while True:
            closes = world._closes  # noqa: SLF001  (what the program closes after this stays closed)
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
                # The program was quicker, or it ends.
                _log.debug("world %r: %s", world.name, exc)
            except StaleGenerationError as exc:
                _log.warning("world %r is not joined again: %s", world.name, exc)
                return False
            except MultiworldError as exc:
                if type(exc).__name__ not in told and world.state is not State.CLOSED:
                    told.add(type(exc).__name__)
                    # Who left in good order may be through, and never come back.
                    left = world.breakage is not None and world.breakage.cause is Cause.LEFT
                    level = logging.INFO if left else logging.WARNING
                    _log.log(level, "world %r is not joined again yet: %s", world.name, exc)
            else:
                return True
            time.sleep(pause)
            pause = AGAIN if time.monotonic() - began > _LONG else min(AGAIN_AT_MOST, 2 * pause)

    def _join(self, closes: int) -> None:
        self._link.ask(ASKING)
        plan = self.world._plan  # noqa: SLF001  (the address that the join had)
        store = self._link.store_of(plan)
        world = self.world

        def closed() -> bool:
            return world._closes != closes  # noqa: SLF001  (same as above)

        joining.rejoin(world, store=store, cancelled=lambda: closed() or self._link.moved(store, plan))
        if closed():  # before that join began, or in its last moment
            world.close()
