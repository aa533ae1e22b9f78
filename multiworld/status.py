"""Status of this process's worlds as data for JSON: for the launcher, and for the page.

Times are ``time.time()`` seconds: they are compared between processes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any, cast

from multiworld._core.operations import lateness
from multiworld._core.operations.log import BEGAN
from multiworld.events import State
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from multiworld.pending import PendingOperation
    from multiworld.world import World

__all__ = ["fitting", "pending_as_dict", "process_status", "waits_of", "world_status"]

_MOST_BYTES = 900_000
"""Of an answer: the control socket's lines have at most 1 MiB."""


class _Clock:
    """Turns ``time.monotonic()`` into ``time.time()`` seconds, the same moment into the same number.

    Only where the host's clock was set is the difference another one.
    """

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def unix(self, monotonic: float) -> float:
        ahead = time.time() - time.monotonic()
        if abs(ahead - self._ahead) > _CLOCK_SET:
            self._ahead = ahead
        return round(monotonic + self._ahead, 3)


_CLOCK_SET = 0.05
_clock = _Clock()


def process_status(*, members: Collection[str] | None = None) -> dict[str, Any]:
    """Return how this process's worlds stand. Quick; asks no other member; any thread.

    Args:
        members: names of the worlds whose members are told; None: of all.

    Keys: ``pid``, ``host``, ``now``, and ``worlds``, see `world_status`; one that is joined for the first
    time has only name and state.
    """
    known, now = registry.worlds(), time.monotonic()
    found = [
        world_status(cast("World", each), now, members=members is None or each.name in members)
        for each in known.values()
    ]
    found += [{"name": name, "state": "joining"} for name in registry.joining() if name not in known]
    return {"pid": os.getpid(), "host": socket.gethostname(), "now": _clock.unix(now), "worlds": found}


def world_status(world: World, now: float, *, members: bool = True) -> dict[str, Any]:
    """Return how one world stands in this process.

    Args:
        world: to look at.
        now: ``time.monotonic()`` seconds.
        members: whether to tell who they are.

    Returns:
        ``name, state, generation, backend, rank, size, sizes`` ("MIN:MAX" or ""), ``since`` (of the state);
        ``cause, ranks, detail`` and ``broke`` of the breakage; ``members``: rows of rank, pid, host and seat;
        ``busy``: ranks; ``waits``: seconds since the oldest operation that is not over was called; ``ready``;
        ``sent`` and ``received``: rows of rank, messages and bytes.
    """
    gen, machine = world._gen, world._next  # noqa: SLF001  (the handle's own package)
    machine = gen.machine if machine is None else machine
    breakage = gen.breakage
    state = world.state
    waiting = gen.operations.log.waiting(now) if state is State.ACTIVE else ()
    plan, totals = world._plan, gen.operations.totals  # noqa: SLF001  (a view of what this package made)
    totals.settle()
    return {
        "name": world.name,
        "state": state.value,
        "generation": gen.number,
        "backend": world.backend,
        "rank": gen.rank,
        "size": gen.size,
        "sizes": f"{plan.least}:{plan.world_size}" if plan.assigned else "",
        "since": _clock.unix(machine.since),
        "ready": world.ready,
        "busy": list(world.busy),
        "waits": round(now - waiting[0][BEGAN], 3) if waiting else 0.0,
        "members": [
            [each.rank, each.pid, each.hostname, each.seat]
            for each in (gen.roster.members if members else ())
        ],
        "cause": "" if breakage is None else breakage.cause.value,
        "ranks": [] if breakage is None else list(breakage.ranks),
        "detail": "" if breakage is None else breakage.detail,
        "sent": _traffic(totals.sent, totals.sent_bytes),
        "received": _traffic(totals.received, totals.received_bytes),
        "broke": None if breakage is None else _clock.unix(breakage.at),
    }


def _traffic(messages: list[int], sizes: list[int]) -> list[list[int]]:
    # The last place is for messages whose other end is not known.
    rows = zip(messages[:-1], sizes[:-1], strict=True)
    return [[rank, count, size] for rank, (count, size) in enumerate(rows) if count]


def waits_of(names: Iterable[str], timeout: float) -> dict[str, dict[str, Any]]:
    """Ask the members of these worlds, all at once, what they wait for; takes `timeout` seconds at most.

    Returns:
        By world ``pending`` (rows of `pending_as_dict`) and ``waited`` (`World.waited_for`, ranks as text).
        Worlds that are not active in this process are left out.
    """
    known, asked = registry.worlds(), []
    for name in names:
        world = cast("World | None", known.get(name))
        if world is not None and world.state is State.ACTIVE:
            operations = world._gen.operations  # noqa: SLF001  (the handle's own package)
            asked.append((name, operations, operations.begin_asking()))
    deadline, now = time.monotonic() + timeout, time.time()
    found = {}
    for name, operations, answers in asked:
        reports = answers(deadline)
        waited = lateness.waited_for(reports)
        found[name] = {
            "pending": [pending_as_dict(each, now) for each in operations.pending_among(reports)],
            "waited": {str(rank): round(seconds, 2) for rank, seconds in waited.items()},
        }
    return found


def pending_as_dict(operation: PendingOperation, now: float) -> dict[str, Any]:
    """Return an operation as JSON has it; `since` is when the first member called it."""
    return {
        "text": str(operation),
        "kind": operation.kind,
        "number": operation.number,
        "size": operation.size,
        "peer": operation.peer,
        "tag": operation.tag,
        "since": round(now - operation.seconds, 3),
        "waiting": sorted(operation.waiting),
        "missing": {str(rank): text for rank, text in sorted(operation.missing.items())},
        "idle": operation.idle,
    }


def fitting(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that fits into a line of the control socket.

    Of one that is too long details go first: who is missing in each of many operations, then who the members
    of the worlds are, then what waits at all.
    """
    if _fits(answer):
        return answer
    short = {
        name: {**each, "pending": [_short(row) for row in each["pending"][:3]]}
        for name, each in answer["waits"].items()
    }
    answer = {**answer, "waits": short}
    if _fits(answer):
        return answer
    status = answer["status"]
    worlds = [
        {**{key: each[key] for key in each if key not in {"sent", "received"}}, "members": []}
        for each in status["worlds"]
    ]
    answer = {**answer, "status": {**status, "worlds": worlds}}
    return answer if _fits(answer) else {**answer, "waits": {}}


def _fits(answer: dict[str, Any]) -> bool:
    return len(json.dumps(answer)) <= _MOST_BYTES


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "text": row["text"][:200], "missing": {}, "waiting": row["waiting"][:32]}
