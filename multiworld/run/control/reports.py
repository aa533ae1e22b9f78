"""`event_of`: what a worker reports of its worlds, as an event of the run. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld._net.launcher_connection import ProtocolError
from multiworld.run.events import CallsRaised, StateProgress, WorldChanged

if TYPE_CHECKING:
    from multiworld.run.events import RunEvent

__all__ = ["event_of", "whole"]

STATES = frozenset({"joining", "active", "broken", "closed", "failed"})
_LONGEST_NAME = 200
_LATEST = 1 << 63


def event_of(message: dict[str, Any], rank: int, now: float) -> RunEvent:
    """Return the event of a worker's message about a world; its texts are cut.

    Args:
        message: with "world", and "received" (bytes of its state) or "raised" (when its blocked calls had
            raised); else a change of its state.
        rank: of the worker, in the run.
        now: ``time.time()`` seconds.

    Raises:
        ProtocolError: a value is of the wrong type or range.
    """
    world = message["world"]
    if isinstance(world, str):
        name = world[:_LONGEST_NAME]
        of = _progress if "received" in message else _raised if "raised" in message else _changed
        event = of(message, rank, name, now)
        if event is not None:
            return event
    raise ProtocolError(f"report {str(message)[:200]!r}")


def _progress(message: dict[str, Any], rank: int, world: str, now: float) -> RunEvent | None:
    received, total = message["received"], message.get("total")
    if not all(whole(each, 1 << 63) for each in (received, total)):
        return None
    return StateProgress(now, rank, world, int(received), int(total or 0))


def _raised(message: dict[str, Any], rank: int, world: str, now: float) -> RunEvent | None:
    generation, at = message.get("generation"), message["raised"]
    if not whole(generation) or not isinstance(at, int | float) or isinstance(at, bool):
        return None
    if not abs(at) < _LATEST:  # NaN and infinity are no JSON, and a float does not hold every whole number
        return None
    return CallsRaised(min(float(at), now), rank, world, int(generation or 0))


def _changed(message: dict[str, Any], rank: int, world: str, now: float) -> RunEvent | None:
    state, detail, cause = message.get("state"), message.get("detail", ""), message.get("cause", "")
    generation, size = message.get("generation", 0), message.get("size", 0)
    sizes, ranks = message.get("sizes", ""), message.get("ranks", [])
    texts = all(isinstance(each, str) for each in (state, detail, cause, sizes))
    numbers = whole(generation) and whole(size) and isinstance(ranks, list) and all(map(whole, ranks))
    if not texts or state not in STATES or not numbers:
        return None
    of_range = int(size), sizes[:40], tuple(ranks[:1024])
    return WorldChanged(now, rank, world, state, int(generation), detail[:2000], cause[:20], *of_range)


def whole(value: object, end: int = 1 << 31) -> bool:
    """Whether a value of JSON is a whole number from 0 on, below `end`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
