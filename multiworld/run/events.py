"""What happens in a run, as frozen records, and the bus that hands them to the log, the screen and ``status``.

Times are ``time.time()`` seconds: they are shown to people and compared between hosts.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Happening", "Happenings", "NodeJoined", "NodeLost", "Note", "RunEnded", "RunStarted", "SeatTaken",
    "WorkerEnded", "WorkerFailed", "WorkerRestarting", "WorkerStarted", "WorkerStopped", "WorldChanged",
]  # fmt: skip

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Happening:
    """Base of all of them.

    Attributes:
        at: ``time.time()`` seconds.
    """

    at: float


@dataclass(frozen=True)
class RunStarted(Happening):
    """The launcher begins.

    Attributes:
        run_id: rendezvous id.
        restart: "worker" or "group".
        max_restarts: for each worker ("worker") or for all together ("group").
        entrypoint: what the workers run, for people.
        node: this host's name.
    """

    run_id: str
    restart: str
    max_restarts: int
    entrypoint: str
    node: str


@dataclass(frozen=True)
class SeatTaken(Happening):
    """This node has (or lost) its place among the nodes.

    Attributes:
        seat: 0, 1, ...; None: a spare node, without workers.
        nodes: how many nodes have a seat.
    """

    seat: int | None
    nodes: int


@dataclass(frozen=True)
class WorkerStarted(Happening):
    """A worker's process was started.

    Attributes:
        rank, role, role_rank, local_rank: its place; the same in every attempt.
        pid: of the new process.
        attempt: 0 for the first start, one more after each restart.
    """

    rank: int
    role: str
    role_rank: int
    local_rank: int
    pid: int
    attempt: int


@dataclass(frozen=True)
class WorkerFailed(Happening):
    """A worker's process ended with another exit code than 0, and nobody asked it to.

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
class WorkerRestarting(Happening):
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
class WorkerEnded(Happening):
    """A worker's process ended with exit code 0."""

    rank: int
    pid: int


@dataclass(frozen=True)
class WorkerStopped(Happening):
    """The launcher ended a worker's process."""

    rank: int
    pid: int
    exitcode: int | None


@dataclass(frozen=True)
class WorldChanged(Happening):
    """A worker said how one of its worlds stands.

    Attributes:
        rank: of the worker in the run (not in the world).
        world: its name.
        state: "joining", "active", "broken" or "closed"; "failed" for a join that came to nothing.
        generation: 0 as long as it is not known.
        detail: of a breakage or a failed join; of an active world: which member is busy.
        cause: of a breakage ("left" is no fault), and of the one that a failed join comes after; else empty.
    """

    rank: int
    world: str
    state: str
    generation: int
    detail: str = ""
    cause: str = ""


@dataclass(frozen=True)
class NodeJoined(Happening):
    """A node took a seat, or stands by as a spare (`seat` is None)."""

    node: str
    seat: int | None


@dataclass(frozen=True)
class NodeLost(Happening):
    """A node's launcher is gone.

    Attributes:
        node: host name.
        seat: that it had.
        cause: "crashed", "hung", "unreachable", "left".
        worlds: names of the worlds that cannot be whole without it.
    """

    node: str
    seat: int | None
    cause: str
    worlds: tuple[str, ...]


@dataclass(frozen=True)
class Note(Happening):
    """Anything else that people should read; `level` is one of logging's numbers."""

    level: int
    text: str


@dataclass(frozen=True)
class RunEnded(Happening):
    """The launcher is done; `exitcode` is what it will return."""

    exitcode: int
    reason: str


class Happenings:
    """Hands what happens to those who listen, in the thread that saw it. A listener that raises is logged.

    Args:
        signals: exceptions by which a signal's handler ends the run. They can be raised inside a listener and are no
            fault of it: `publish` raises them.
    """

    def __init__(self, *, signals: tuple[type[BaseException], ...] = ()) -> None:
        self._signals = signals
        self._lock = threading.Lock()
        self._listeners: tuple[Callable[[Happening], None], ...] = ()

    def listen(self, fn: Callable[[Happening], None]) -> None:
        """Call ``fn(happening)`` for everything from now on; it must be quick."""
        with self._lock:
            self._listeners = (*self._listeners, fn)

    def publish(self, happening: Happening) -> None:
        """Hand it to every listener.

        Raises:
            BaseException: one of `signals`, once all listeners were called.
        """
        signalled: BaseException | None = None
        for fn in self._listeners:
            try:
                fn(happening)
            except self._signals as came:  # noqa: PERF203  (each listener has its own fate)
                signalled = came
            except Exception:  # noqa: BLE001  (a listener's fault stays there)
                _log.exception("a listener failed on %r", happening)
        if signalled is not None:
            raise signalled
