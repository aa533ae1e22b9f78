"""Points of a join, a reform or a preparation at which a member stands still, to be killed or stopped there, or dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import multiworld as mw
from kits.contract.worldkit import PATIENCE

__all__ = ["POINTS", "SAID", "die", "die_in_the_next_join", "stand_still"]

POINTS = ["claimed", "agreed", "attached", "connected", "built", "ready"]
SAID = "said"
"""Its limit is known to the others; only where the next generation is prepared beside a working one."""


def die(*_: object) -> None:
    """End this process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_next_join() -> None:
    """End this process some milliseconds after its next join began: somewhere in it."""

    def joining(event: object) -> None:
        if isinstance(event, mw.WorldJoining):
            threading.Timer(0.004, die).start()

    mw.subscribe(joining)


def stand_still(me: Any, point: str) -> None:
    """Emit "there" at a point of the next join, or of the next preparation, and go no further."""
    from multiworld._c10d import groups
    from multiworld._join import lane, steps
    from multiworld._net.stores.rendezvous import Rendezvous
    from multiworld.watchdog import Watchdog

    def halt(*_args: Any, **_keywords: Any) -> None:
        me.emit("there")
        time.sleep(10 * PATIENCE)

    def after(call: Any) -> Any:
        def run(*args: Any, **keywords: Any) -> Any:
            found = call(*args, **keywords)
            halt()
            return found

        return run

    if point == "claimed":
        Rendezvous._claim = after(Rendezvous._claim)
    elif point == "agreed":
        Rendezvous.agree = after(Rendezvous.agree)
    elif point == "attached":
        Watchdog.attach = after(Watchdog.attach)
    elif point == "connected":
        lane.connect = steps.lane.connect = after(lane.connect)
    elif point == "built":
        groups.build = steps.groups.build = after(groups.build)
    elif point == "ready":
        Rendezvous._raise_if_closed = halt
    elif point == "said":
        Rendezvous._say_limit = after(Rendezvous._say_limit)
