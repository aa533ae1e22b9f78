"""Events of a run, as frozen records, and the bus to the log, the live view and ``status``.

Times are ``time.time()`` seconds: they are shown to people and compared between hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.events import Bus

__all__ = [
    "CallsRaised", "EventBus", "NodeJoined", "NodeLost", "Note", "RunEnded", "RunEvent", "RunStarted",
    "SlotTaken", "StateProgress", "WorkerEnded", "WorkerFailed", "WorkerRestarting", "WorkerRetiring",
    "WorkerStarted", "WorkerStopped", "WorldChanged",
]  # fmt: skip


@dataclass(frozen=True)
class RunEvent:
    """Base of a run's events.

    Attributes:
        at: ``time.time()`` seconds.
    """

    at: float


@dataclass(frozen=True)
class RunStarted(RunEvent):
    """The launcher begins.

    Attributes:
        run_id: rendezvous id.
        restart: "worker" or "group".
        max_restarts: for each worker ("worker") or for all together ("group").
        entrypoint: what the workers run, for people.
        node: this host's name.
        secure: whether all connections are TLS.
    """

    run_id: str
    restart: str
    max_restarts: int
    entrypoint: str
    node: str
    secure: bool = False


@dataclass(frozen=True)
class SlotTaken(RunEvent):
    """This node has got a slot, or lost it.

    Attributes:
        slot: 0, 1, ...; None: a spare node, without workers.
        nodes: number of slots.
    """

    slot: int | None
    nodes: int


@dataclass(frozen=True)
class WorkerStarted(RunEvent):
    """A worker's process was started.

    Attributes:
        rank, role, role_rank, local_rank: of the worker; the same in every attempt.
        pid: of the new process.
        attempt: 0 for the first start, one more after each restart.
        stdout, stderr: paths of its log files; "": it has none.
    """

    rank: int
    role: str
    role_rank: int
    local_rank: int
    pid: int
    attempt: int
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class WorkerFailed(RunEvent):
    """A worker's process ended with another exit code than 0, unasked.

    Attributes:
        exitcode: negative: the signal that ended it.
        message: one line: the exception from torch's error file, or how it ended.
    """

    rank: int
    pid: int
    attempt: int
    exitcode: int
    message: str


@dataclass(frozen=True)
class WorkerRestarting(RunEvent):
    """A failed worker will be started again.

    Attributes:
        attempt: the number of the coming start.
        delay: seconds until then.
        left: restarts that remain after this one.
    """

    rank: int
    attempt: int
    delay: float
    left: int


@dataclass(frozen=True)
class WorkerRetiring(RunEvent):
    """A worker was asked to leave its worlds and to end.

    Attributes:
        drain: seconds until it gets SIGTERM.
    """

    rank: int
    drain: float


@dataclass(frozen=True)
class WorkerEnded(RunEvent):
    """A worker's process ended with exit code 0."""

    rank: int
    pid: int


@dataclass(frozen=True)
class WorkerStopped(RunEvent):
    """The launcher ended a worker's process."""

    rank: int
    pid: int
    exitcode: int | None


@dataclass(frozen=True)
class WorldChanged(RunEvent):
    """A worker reported the state of one of its worlds.

    Attributes:
        rank: of the worker in the run (not in the world).
        world: its name.
        state: "joining", "active", "broken" or "closed"; "failed" for a join that failed.
        generation: 0 as long as it is not known.
        detail: of a breakage or a failed join; of an active world: its busy members.
        cause: of a breakage ("left" is no fault), or of the breakage before a failed join; else empty.
        size: members of an active world; 0: not known.
        sizes: "MIN:MAX" of a world of a range; else empty.
        ranks: in the world, of the members that a breakage is due to.
    """

    rank: int
    world: str
    state: str
    generation: int
    detail: str = ""
    cause: str = ""
    size: int = 0
    sizes: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class StateProgress(RunEvent):
    """A worker gets the state of one of its worlds, or has it.

    Attributes:
        rank: of the worker in the run.
        world: its name.
        received, total: bytes; equal: it has all.
    """

    rank: int
    world: str
    received: int
    total: int


@dataclass(frozen=True)
class CallsRaised(RunEvent):
    """All calls of a worker have raised that were blocked when one of its worlds broke; `at` is when.

    Attributes:
        rank: of the worker in the run.
        world: its name.
        generation: that broke.
    """

    rank: int
    world: str
    generation: int


@dataclass(frozen=True)
class NodeJoined(RunEvent):
    """A node took a slot, or is a spare (`slot` is None)."""

    node: str
    slot: int | None


@dataclass(frozen=True)
class NodeLost(RunEvent):
    """A node's launcher is gone.

    Attributes:
        node: host name.
        slot: that it had.
        cause: "crashed", "hung", "unreachable", "left".
        worlds: names of the worlds that cannot be whole without it.
    """

    node: str
    slot: int | None
    cause: str
    worlds: tuple[str, ...]


@dataclass(frozen=True)
class Note(RunEvent):
    """Any other text for the log; `level` is one of logging's numbers."""

    level: int
    text: str


@dataclass(frozen=True)
class RunEnded(RunEvent):
    """The launcher ends, with `exitcode`."""

    exitcode: int
    reason: str


EventBus = Bus[RunEvent]
"""Hands the events of a run to the log, the live view and ``status``."""
