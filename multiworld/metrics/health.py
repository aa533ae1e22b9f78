"""Health of this process, and whether its worlds can be worked in: for Kubernetes' probes and others."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from multiworld.events import State
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from multiworld.world import World

__all__ = ["STILL", "Health", "live", "ready"]

STILL = 30.0
"""Seconds without a turn of the watchdog's thread, which turns every 5 s: the process is not live then."""


@dataclass(frozen=True)
class Health:
    """An answer to a probe.

    Attributes:
        ok: the answer.
        text: why not, a line for each reason; "ok".
    """

    ok: bool
    text: str


def live() -> Health:
    """Whether the thread that monitors this process's worlds works: if not, only a restart helps."""
    # A process that was stopped and goes on has not turned for as long: a look later it has.
    for pause in (0.1, 0.9, 0.0):
        seconds = registry.watchdog_still()
        if seconds is None or seconds < STILL:
            return _health([])
        time.sleep(pause)
    if seconds == math.inf:
        return _health(["the watchdog's thread has ended, and nothing monitors this process's worlds"])
    return _health([f"the watchdog's thread has not turned for {seconds:.0f} s"])


def ready(worlds: Collection[str] = ()) -> Health:
    """Whether this process can work in its worlds: they are active, and this member has their latest state.

    Args:
        worlds: names; by default those that this process has joined and not closed. One that is named and was
            not joined is not ready.
    """
    known = cast("Mapping[str, World]", registry.worlds())  # joins register nothing else
    joining = registry.joining()
    found = []
    for name in worlds or known:
        world = known.get(name)
        if world is None:
            found.append(
                f"world {name!r}: " + ("this process is joining it" if name in joining else "not joined")
            )
        elif not world.ready:
            found.append(f"world {name!r}: {_why(world)}")
    return _health(found)


def _why(world: World) -> str:
    if (state := world.state) is State.ACTIVE:
        return f"generation {world.generation}: this member has not its latest state yet"
    breakage = world.breakage
    if breakage is None:
        return f"{state}, generation {world.generation}"
    seconds = max(0.0, time.monotonic() - breakage.at)
    return f"{state}, generation {world.generation}: {breakage.cause} {seconds:.1f} s ago, {breakage.detail}"


def _health(reasons: list[str]) -> Health:
    return Health(not reasons, "\n".join(reasons) or "ok")
