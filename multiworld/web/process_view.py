"""The page's view of one process: its worlds, as they stand, and what its events told. Pure."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from multiworld._core.timeline import FaultTimeline
from multiworld.events import (
    MemberBusy,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
    WorldReady,
    WorldStateReceived,
    WorldStuck,
    WorldUnblocked,
)
from multiworld.web.worlds import VERSION, member, world

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.events import Event
    from multiworld.web.links import Links

__all__ = ["EventTrack", "view_of_process"]

LAST = 200
"""Events that a view has."""

_HERE = "this process"


class EventTrack:
    """What the events of this process's bus told since it was made; any thread.

    Args:
        clock: returns ``time.time() - time.monotonic()``. Events have monotonic times, and the host's clock
            may be set between two.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # a signal's handler may join or close a world in the middle
        self._count = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=LAST)
        self._faults = FaultTimeline()
        self._transfers: dict[str, tuple[int, int]] = {}

    def apply(self, event: Event) -> None:
        """Note an event. Quick."""
        at = event.at + self._clock()
        with self._lock:
            if isinstance(event, WorldStateReceived):
                if event.received >= event.total:
                    self._transfers.pop(event.world, None)
                else:
                    self._transfers[event.world] = event.received, event.total
                return
            text, level = _text(event)
            self._count += 1
            self._events.append(
                {"id": self._count, "at": round(at, 3), "world": event.world, "level": level, "text": text}
            )
            name = event.world
            if isinstance(event, WorldClosed):
                self._transfers.pop(name, None)
                self._faults.closed(name)
            elif isinstance(event, WorldBroken):
                why = event.breakage
                self._transfers.pop(name, None)
                self._faults.broke(at, name, event.generation, _HERE, why.cause.value, why.ranks, why.detail)
            elif isinstance(event, WorldUnblocked):
                self._faults.unblocked(at, name, event.generation, _HERE)
            elif isinstance(event, WorldJoining):
                self._faults.joining(at, name, _HERE)
            elif isinstance(event, WorldActive):
                self._faults.active(at, name, event.generation, _HERE, whole=True)

    def told(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, tuple[int, int]]]:
        """Return the last events, the faults, and by world how many bytes of its state have come."""
        with self._lock:
            return list(self._events), self._faults.faults(), dict(self._transfers)


def view_of_process(
    status: dict[str, Any], track: EventTrack, waits: dict[str, dict[str, Any]], links: Links
) -> dict[str, Any]:
    """Return the view.

    Args:
        status: of `multiworld.status.process_status`.
        track: of the process's events.
        waits: of `multiworld.status.waits_of`.
        links: of this page.
    """
    events, faults, transfers = track.told()
    host, pid = status["host"], status["pid"]
    links.keep({each["name"] for each in status["worlds"]})
    here = f"{host}/{pid}"
    worlds = []
    for each in status["worlds"]:
        rank = each.get("rank", -1)
        received, total = transfers.get(each["name"], (0, 0))
        members = [
            member(
                each, row, f"{row[2]}/{row[1]}", None,
                received=received if row[0] == rank else 0, total=total if row[0] == rank else 0,
            )
            for row in each.get("members", ())
        ]  # fmt: skip
        name = each["name"]
        shown = links.of(name, each.get("generation", 0), {0: each}, status["now"])
        worlds.append(world(each, members, waits.get(name), shown))
    return {
        "version": VERSION,
        "now": status["now"],
        "kind": "process",
        "title": f"process {pid} on {host}",
        "note": "",
        "run": None,
        "processes": [
            {
                "id": here, "rank": None, "role": "", "pid": pid, "host": host, "state": "up", "since": None,
                "restarts": 0, "last": events[-1]["text"] if events else "", "logs": [],
            }
        ],
        "worlds": worlds,
        "faults": faults,
        "totals": {},
        "events": events,
    }  # fmt: skip


def _text(event: Event) -> tuple[str, str]:
    """Return an event in a line, and its level."""
    name, of = event.world, f", generation {event.generation}" if event.generation else ""
    match event:
        case WorldJoining():
            return f"{name} joining", "info"
        case WorldActive(world_size=size):
            return f"{name} active{of}, {size} members", "info"
        case WorldJoinFailed(error=error):
            return f"{name} not joined: {error}", "warning"
        case WorldBroken(breakage=why):
            level = "info" if why.cause.value == "left" else "warning"
            return f"{name} broken{of}: {why.cause.value}, ranks {list(why.ranks)}: {why.detail}", level
        case WorldUnblocked(calls=calls, seconds=seconds):
            return f"{name}{of}: {calls} blocked calls raised within {1000 * seconds:.1f} ms", "info"
        case WorldReady(provider=provider, seconds=seconds):
            source = "this member had it" if provider < 0 else f"from rank {provider} in {seconds:.2f} s"
            return f"{name} ready: its state, {source}", "info"
        case MemberBusy(ranks=ranks, busy=busy):
            what = "run and do not answer" if busy else "answer again"
            return f"{name}: ranks {list(ranks)} {what}", "warning" if busy else "info"
        case WorldStuck(operation=operation):
            return f"{name}: {operation}", "warning"
        case WorldClosed():
            return f"{name} closed", "info"
    return f"{name}: {type(event).__name__}", "info"
