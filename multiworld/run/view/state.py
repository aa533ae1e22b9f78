"""State of a run, reduced from its events; its snapshot is shown by the live view and ``m8d-run status``.

Nothing here blocks; the clock is a parameter.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiworld._core.timeline import FaultTimeline
from multiworld.run.events import (
    CallsRaised,
    NodeJoined,
    NodeLost,
    RunEnded,
    RunStarted,
    SlotTaken,
    StateProgress,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarting,
    WorkerRetiring,
    WorkerStarted,
    WorkerStopped,
    WorldChanged,
)
from multiworld.run.view.messages import describe, level_of, natural, one_line
from multiworld.run.view.renumbering import Renumbering
from multiworld.run.view.world_state import OVER, range_state, world_state

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from multiworld.run.events import RunEvent

__all__ = ["KEPT", "LAST", "UP_AFTER", "VERSION", "RunState"]

VERSION = 1
"""Version of the snapshot. Keys may be added within a version; none changes its meaning."""

UP_AFTER = 10.0
"""Seconds after which a worker that reports no world counts as up."""

LAST = 20
"""How many of the last events a snapshot holds where nothing else is asked for."""

KEPT = 500
"""How many of the last events are kept: a member's end may break hundreds of worlds at once."""

_MOST_WORLDS = 512
_LONGEST_TEXT = 500
_TOKEN = re.compile(r"\?token=\S+")
_LIVE = frozenset({"starting", "up", "retiring"})
_OVER = frozenset({"ended", "stopped"})
_LEFT = "left"


@dataclass
class _WorldReport:
    """Last report of one worker about one world; `received` of `total` bytes of its state have come.

    `left`: its last generation ended when another member left in good order, and it is in no later one.
    """

    state: str
    generation: int
    size: int = 0
    sizes: str = ""
    received: int = 0
    total: int = 0
    left: bool = False


@dataclass
class _WorkerState:
    rank: int
    role: str
    role_rank: int
    local_rank: int
    pid: int
    attempt: int
    restarts: int
    state: str
    since: float
    last: str
    logs: dict[str, str]


@dataclass
class _OtherNode:
    slot: int | None
    state: str
    since: float


class RunState:
    """The state of a run after its events so far. Any thread may call any method.

    Args:
        clock: ``time.time`` or a test's.
        places: ranks in the worlds, where they are planned: (world, rank in the run) -> rank.
        planned: ranks in the run of the workers that a worlds file has in each world.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        places: Mapping[tuple[str, int], int] | None = None,
        planned: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        self._places = places or {}
        self._planned = planned or {}
        self._clock = clock
        self._lock = threading.Lock()
        self._changes = 0
        self._run: dict[str, Any] = {
            "run_id": "", "node": "", "restart": "", "max_restarts": 0, "entrypoint": "", "started": None,
            "secure": False,
        }  # fmt: skip
        self._slot: int | None = None
        self._nodes = 0
        self._former: set[tuple[int, int]] = set()  # rank and pid of workers of a seat that was lost
        self._workers: dict[int, _WorkerState] = {}
        self._worlds: dict[str, dict[int, _WorldReport]] = {}
        self._notes: dict[str, dict[int | None, str]] = {}  # by world and lost seat: why it is not whole
        self._busy: dict[str, str] = {}
        self._faults = FaultTimeline()
        self._renumbering = Renumbering()
        self._totals = {"failures": 0, "restarts": 0, "nodes_lost": 0}
        self._broken: Counter[str] = Counter()
        self._other_nodes: dict[str, _OtherNode] = {}
        self._last: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._number = 0  # of the last of them
        self._ended: RunEnded | None = None

    @property
    def changes(self) -> int:
        """Number of events applied so far; a view that polls compares it with the last one."""
        return self._changes

    def apply(self, event: RunEvent) -> None:
        """Apply one event. A report of a process that is gone, for example, changes no worker."""
        with self._lock:
            self._changes += 1
            # The page's address has its token, and snapshots go to other nodes.
            text = _TOKEN.sub("?token=...", one_line(describe(event)))[:_LONGEST_TEXT]
            rank = getattr(event, "rank", None)
            self._count(event)
            if self._renumbering.begins(event):
                self._faults.closed(getattr(event, "world", ""))
            self._fold(event, text)
            if isinstance(event, StateProgress | CallsRaised):
                return  # the one comes ten times a second, the other is a step of a fault
            if isinstance(rank, int):
                known = self._workers.get(rank)
                text = f"rank {rank}{f' ({known.role}:{known.role_rank})' if known else ''} {text}"
            level = logging.getLevelName(level_of(event)).lower()
            self._number += 1
            self._last.append({
                "number": self._number, "at": event.at, "level": level, "world": getattr(event, "world", ""),
                "text": text,
            })  # fmt: skip

    def snapshot(self, *, after: int | None = None) -> dict[str, Any]:
        """Return the state as data for JSON; the page "What a run shows" has its keys.

        Args:
            after: number of an event: of those that are kept the later ones are in it; None: the last `LAST`.
        """
        with self._lock:
            now = self._clock()
            of_worker: dict[int, list[dict[str, Any]]] = {}
            worlds = []
            for name in sorted(self._worlds, key=natural):
                members = sorted(self._worlds[name].items())
                sizes = next((each.sizes for _, each in members if each.sizes), "")
                decide = range_state if sizes else world_state
                state, generation = decide((each.state, each.generation) for _, each in members)
                for rank, each in members:
                    said = {"name": name, "state": each.state, "generation": each.generation}
                    of_worker.setdefault(rank, []).append(said)
                worlds.append({
                    "name": name, "state": state, "generation": generation,
                    "members": [
                        {"rank": rank, "state": each.state, "generation": each.generation, **_transfer(each)}
                        | ({"left": True} if each.left else {})
                        | self._place(name, rank)
                        for rank, each in members
                    ],
                    "note": next(reversed(self._notes.get(name, {}).values()), self._busy.get(name, "")),
                    **(_members(sizes, state, generation, [each for _, each in members]) if sizes else {}),
                })  # fmt: skip
            return {
                "version": VERSION,
                **self._run,
                "now": now,
                "seat": self._slot,
                "nodes": self._nodes,
                "peers": [
                    {"node": node, "seat": each.slot, "state": each.state, "since": each.since}
                    for node, each in sorted(self._other_nodes.items(), key=lambda item: natural(item[0]))
                ],
                "workers": [
                    {**vars(each), "state": _state_of(each, now), "worlds": of_worker.get(rank, [])}
                    for rank, each in sorted(self._workers.items())
                ],
                "worlds": worlds,
                "awaited": self._awaited(),
                "faults": self._faults.faults(),
                "totals": {**self._totals, "broken": dict(self._broken)},
                "last": [
                    dict(each)
                    for each in self._last
                    if each["number"] > (self._number - LAST if after is None else after)
                ],
                "ended": None
                if self._ended is None
                else {"exitcode": self._ended.exitcode, "reason": self._ended.reason},
            }

    def _awaited(self) -> list[str]:
        """Return the planned worlds of this node's workers that none of them has begun to join."""
        running = {rank for rank, each in self._workers.items() if each.state not in _OVER}
        return sorted(
            (
                name
                for name, ranks in self._planned.items()
                if name not in self._worlds and not running.isdisjoint(ranks)
            ),
            key=natural,
        )

    def _place(self, name: str, rank: int) -> dict[str, int]:
        place = self._places.get((name, rank))
        return {} if place is None else {"place": place}

    def _count(self, event: RunEvent) -> None:
        match event:
            case WorkerFailed():
                self._totals["failures"] += 1
            case WorkerRestarting():
                self._totals["restarts"] += 1
            case NodeLost():
                self._totals["nodes_lost"] += 1

    def _fold(self, event: RunEvent, text: str) -> None:
        at = event.at
        match event:
            case RunStarted():
                self._run = {
                    "run_id": event.run_id, "node": event.node, "restart": event.restart,
                    "max_restarts": event.max_restarts, "entrypoint": event.entrypoint, "started": at,
                    "secure": event.secure,
                }  # fmt: skip
            case SlotTaken(slot=slot, nodes=nodes):
                moved = slot is None or (self._nodes > 0 and slot != self._slot)
                self._slot, self._nodes = slot, nodes
                self._seated(slot)
                if moved:
                    # The agent ends those that live: their ranks are another node's.
                    self._former = {(rank, each.pid) for rank, each in self._workers.items()}
                    self._forget(rank for rank, each in self._workers.items() if each.state not in _LIVE)
            case WorkerStarted():
                self._started(event, text)
            case WorkerFailed(rank=rank, pid=pid):
                self._over(rank, pid, "failed", at, text)
            case WorkerEnded(rank=rank, pid=pid):
                self._over(rank, pid, "ended", at, text)
            case WorkerStopped(rank=rank, pid=pid):
                self._over(rank, pid, "stopped", at, text)
            case WorkerRestarting(rank=rank):
                worker = self._workers.get(rank)
                if worker is not None and worker.state not in _LIVE:
                    worker.state, worker.since, worker.last = "restarting", at, text
            case WorkerRetiring(rank=rank):
                worker = self._workers.get(rank)
                if worker is not None and worker.state in _LIVE:
                    worker.state, worker.since, worker.last = "retiring", at, text
                elif worker is not None and worker.state == "restarting":  # it was not started again yet
                    worker.state, worker.since, worker.last = "stopped", at, text
                    self._leave(rank, "closed")
            case WorldChanged():
                self._world(event, text)
            case CallsRaised(rank=rank, world=world, generation=generation):
                self._faults.unblocked(event.at, world, generation, f"worker {rank}")
            case StateProgress(rank=rank, world=world):
                report = self._worlds.get(world, {}).get(rank)
                if report is not None:
                    report.received, report.total = event.received, event.total
            case NodeJoined(node=node, slot=slot):
                self._seated(slot)
                self._other_nodes[node] = _OtherNode(slot, "spare" if slot is None else "seated", at)
            case NodeLost(node=node, slot=slot, cause=cause, worlds=worlds):
                self._lost(node, slot, at)
                for world in worlds:
                    self._worlds.setdefault(world, {})
                    notes = self._notes.setdefault(world, {})
                    notes.pop(slot, None)  # the newest is the last
                    notes[slot] = f"not whole: node {node} is lost ({cause})"
            case RunEnded():
                self._ended = event

    def _lost(self, node: str, slot: int | None, at: float) -> None:
        if slot is not None:
            self._other_nodes[node] = _OtherNode(slot, "lost", at)
        elif node in self._other_nodes and self._other_nodes[node].slot is None:
            del self._other_nodes[node]  # no other node will take a seat that a spare never had

    def _seated(self, slot: int | None) -> None:
        """Forget that a node of this seat was lost: another one has it."""
        if slot is None:
            return
        for node, each in list(self._other_nodes.items()):
            if (each.state, each.slot) == ("lost", slot):
                del self._other_nodes[node]
        for world, notes in list(self._notes.items()):
            notes.pop(slot, None)
            if not notes:
                del self._notes[world]
                if not self._worlds.get(world, True):  # no worker of this node is in it
                    del self._worlds[world]

    def _started(self, event: WorkerStarted, text: str) -> None:
        rank = event.rank
        before = self._workers.get(rank)
        # A local rank has one worker: if it got another global rank, the old one is over.
        self._forget(
            other
            for other, each in self._workers.items()
            if other != rank and each.local_rank == event.local_rank
        )
        self._leave(rank)
        self._workers[rank] = _WorkerState(
            rank=rank,
            role=event.role,
            role_rank=event.role_rank,
            local_rank=event.local_rank,
            pid=event.pid,
            attempt=event.attempt,
            # One that had ended with 0 was retired, and is wanted again.
            restarts=0 if before is None else before.restarts + (before.state != "ended"),
            state="starting",
            since=event.at,
            last=text,
            logs={key: path for key, path in (("stdout", event.stdout), ("stderr", event.stderr)) if path},
        )

    def _over(self, rank: int, pid: int, state: str, at: float, text: str) -> None:
        worker = self._workers.get(rank)
        if worker is None or worker.pid != pid:
            return
        # A process that ended with 0, or was retired, is done with its worlds, whether or not it closed them.
        done = state == "ended" or worker.state == "retiring"
        worker.state, worker.since, worker.last = state, at, text
        self._leave(rank, "closed" if done else "gone")
        if (rank, pid) in self._former:
            self._forget((rank,))

    def _world(self, event: WorldChanged, text: str) -> None:
        worker = self._workers.get(event.rank)
        if worker is not None:
            if worker.state not in _LIVE:
                return  # a report that arrived after the end of its process
            worker.last = text
            if event.state == "active" and worker.state != "retiring":
                worker.state = "up"
        elif self._nodes:
            return  # the same, of a process of a seat that was lost
        world = self._worlds.setdefault(event.world, {})
        before = world.get(event.rank)
        known = before.generation if before is not None else 0
        sizes = event.sizes or (before.sizes if before is not None else "")
        size = event.size or (before.size if before is not None else 0)
        left = event.state in {"joining", "failed"} and before is not None and before.left
        left = event.cause == _LEFT if event.state == "broken" else left
        world[event.rank] = _WorldReport(event.state, event.generation or known, size, sizes, left=left)
        self._busy.pop(event.world, None)
        if event.state == "active" and event.detail:
            self._busy[event.world] = event.detail
        elif event.state == "active" and event.size:  # else a member that was busy answers again
            self._notes.pop(event.world, None)
        self._fault(event)
        if len(self._worlds) > _MOST_WORLDS:
            self._forget_worlds()

    def _fault(self, event: WorldChanged) -> None:
        who = f"worker {event.rank}"
        if event.state == "broken":
            if self._faults.broke(
                event.at, event.world, event.generation, who, event.cause, event.ranks, event.detail
            ):
                self._broken[event.cause] += 1
        elif event.state == "joining":
            self._faults.joining(event.at, event.world, who)
        elif event.state == "active":
            members = self._worlds[event.world].values()
            decide = range_state if any(each.sizes for each in members) else world_state
            whole = decide((each.state, each.generation) for each in members)[0] == "active"
            self._faults.active(event.at, event.world, event.generation, who, whole=whole)
        elif event.state == "closed" and all(
            each.state in OVER for each in self._worlds[event.world].values()
        ):
            self._faults.closed(event.world)

    def _leave(self, rank: int, state: str = "gone") -> None:
        for world in self._worlds.values():
            report = world.get(rank)
            if report is not None and report.state != "closed":
                report.state, report.left = state, False

    def _forget(self, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            del self._workers[rank]
            for name in list(self._worlds):
                self._worlds[name].pop(rank, None)
                if not self._worlds[name] and name not in self._notes:
                    del self._worlds[name]

    def _forget_worlds(self) -> None:
        # Bounds the launcher's memory for workers that make ever new worlds.

        for name in list(self._worlds):
            if len(self._worlds) <= _MOST_WORLDS // 2:
                return
            reports = self._worlds[name].values()
            if all(each.state in OVER or self._came_to_nothing(name, each) for each in reports):
                del self._worlds[name]
                self._notes.pop(name, None)
                self._busy.pop(name, None)

    def _came_to_nothing(self, name: str, report: _WorldReport) -> bool:
        """Whether a worker's join failed that is not repeated: of a world that no worlds file has."""
        return report.state == "failed" and not report.generation and name not in self._planned


def _transfer(report: _WorldReport) -> dict[str, int]:
    """Return how much of its state a member has, while it comes."""
    coming = report.state == "active" and report.received < report.total
    return {"received": report.received, "total": report.total} if coming else {}


def _members(sizes: str, state: str, generation: int, reports: Iterable[_WorldReport]) -> dict[str, Any]:
    """Return how many members a world of a range has, and how many processes of this node wait to be one."""
    told = list(reports)
    size = max(
        (each.size for each in told if (each.state, each.generation) == ("active", generation)), default=0
    )
    waiting = sum(each.state == "joining" for each in told) if state == "active" else 0
    return {"size": size, "sizes": sizes, "waiting": waiting}


def _state_of(worker: _WorkerState, now: float) -> str:
    if worker.state == "starting" and now - worker.since >= UP_AFTER:
        return "up"
    return worker.state
