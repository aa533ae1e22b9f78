"""`LauncherReports`: this process's connection to its launcher, which is told the states of its worlds.

The first join of a process makes it, where ``M8D_CONTROL`` names a launcher's socket, and a later one where
there is none, or it has ended: the launcher's log, page, numbers and `m8d-run status` then know the process's
worlds, whether or not a worlds file has them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from multiworld import settings
from multiworld._c10d.waiter_pool import ending
from multiworld._net.launcher_connection import ControlClient
from multiworld.events import (
    MemberBusy,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
    WorldStateReceived,
    WorldUnblocked,
    bus,
)
from multiworld.launched.retirement import Retirement
from multiworld.logs.source import logger
from multiworld.status import fitting, process_status, waits_of
from multiworld.world import worlds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from multiworld.events import Event

__all__ = ["LauncherReports", "connect_if_launched", "reports"]

CONTROL = "M8D_CONTROL"
"""Environment variable with the path of the launcher's socket."""

_CONNECTING = 1.0
"""Seconds that the launcher's socket has to accept before a join goes on without it."""

_WAITS = 1.0
"""Seconds that members have to say what they are doing, when the launcher looks."""

_OVER = frozenset({"closed", "failed"})

_MOST = 1000
"""Worlds whose last reports are kept for a further connection."""

_STATES: dict[type[Event], str] = {
    WorldJoining: "joining",
    WorldActive: "active",
    MemberBusy: "active",
    WorldBroken: "broken",
    WorldClosed: "closed",
    WorldJoinFailed: "failed",
}

_log = logger(__name__)


class LauncherReports:
    """See the module.

    Attributes:
        client: the connection; None before it is made.
        retirement: whether the launcher retires this worker.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.client: ControlClient | None = None
        self.retirement = Retirement()
        self._connecting = threading.Lock()
        self._subscribed = False
        self._telling = threading.RLock()  # a signal's handler may publish, too
        self._said: dict[str, dict[str, Any]] = {}  # the last report of each world, for a further connection
        self._causes: dict[str, str] = {}
        self._joining: set[str] = set()
        self._closed: set[str] = set()  # while they were joined
        self._busy: dict[str, frozenset[int]] = {}

    def connect(self, deadline: float) -> ControlClient:
        """Return the connection; where there is none, or it has ended, make it, and say who this worker is.

        Args:
            deadline: ``time.monotonic()`` seconds until which to connect.

        Raises:
            LookupError: this process has no launcher.
            OSError: the launcher's socket does not accept.
        """
        with self._connecting:
            former = self.client
            if former is None or not former.alive:
                path, rank = settings.environment(CONTROL), settings.environment("RANK") or ""
                if not path or not rank.isdigit():
                    raise LookupError(f"{CONTROL} is {path!r} and RANK is {rank!r}")
                if not self._subscribed:
                    # Before the connection, which may not come about: a later one tells what happens now.
                    self._subscribed = True
                    bus.subscribe(self.tell)
                attempt = settings.environment("TORCHELASTIC_RESTART_COUNT") or ""
                client = ControlClient(
                    path,
                    deadline=deadline,
                    retired=self.retirement.begin,
                    looked=self._look,
                    store="" if former is None else former.store,
                )
                client.introduce({
                    "hello": "worker",
                    "rank": int(rank),
                    "pid": os.getpid(),
                    "attempt": int(attempt) if attempt.isdigit() else 0,
                })  # fmt: skip
                with self._telling:
                    self.client = client
                    for world, said in tuple(self._said.items()):  # some may have been lost meanwhile
                        client.report(said)
                        if said["state"] in _OVER:
                            del self._said[world]
                return client
            return former

    def tell(self, event: Event) -> None:
        """Report an event of a world to the launcher, or keep it for a connection. Never blocks."""
        client, state = self.client, _STATES.get(type(event))
        if os.getpid() != self._pid:
            return
        if client is not None and isinstance(event, WorldStateReceived):
            client.report({"world": event.world, "received": event.received, "total": event.total})
        if client is not None and isinstance(event, WorldUnblocked):
            at = time.time() - (time.monotonic() - event.at)
            client.report({"world": event.world, "generation": event.generation, "raised": at})
        if state is None:
            return
        world, detail, cause = event.world, "", ""
        busy = self._busy.pop(world, frozenset())
        ranks: tuple[int, ...] = ()
        if isinstance(event, WorldBroken):
            detail, cause = event.breakage.detail, str(event.breakage.cause)
            ranks = event.breakage.ranks
            self._causes[world] = cause
        elif isinstance(event, WorldJoinFailed):
            self._joining.discard(world)
            if world in self._closed:
                self._closed.discard(world)
                return  # it was given up because of the close, which was reported
            detail, cause = str(event.error), self._causes.get(world, "")
        elif isinstance(event, MemberBusy):
            busy = busy | set(event.ranks) if event.busy else busy - set(event.ranks)
            if busy:
                self._busy[world] = busy
            detail = _busy(sorted(busy))
        elif isinstance(event, WorldClosed):
            self._causes.pop(world, None)
            if world in self._joining:
                self._closed.add(world)
        elif isinstance(event, WorldJoining):
            self._joining.add(world)
            self._closed.discard(world)
        else:
            self._joining.discard(world)
            self._causes.pop(world, None)
        said = {
            "world": world,
            "state": state,
            "generation": event.generation,
            "detail": detail[:2000],
            "cause": cause,
            **({"ranks": list(ranks)} if ranks else {}),
        }
        if isinstance(event, WorldActive):
            said |= {"size": event.world_size, "sizes": _sizes(world)}
        with self._telling:
            client = self.client
            before = self._said.pop(world, {})
            if state not in _OVER or client is None or not client.alive:
                # That of a busy member has no sizes.
                self._said[world] = before | said if isinstance(event, MemberBusy) else said
                if len(self._said) > _MOST:
                    del self._said[next(iter(self._said))]
            if client is not None:
                client.report(said)

    def _look(self, question: dict[str, Any]) -> None:
        """Answer how this process's worlds stand, in another thread: members are asked."""
        with contextlib.suppress(RuntimeError):  # the host has no thread left for this process
            ending.run(lambda: self._answer(question))

    def _answer(self, question: dict[str, Any]) -> None:
        client = self.client
        if client is None or os.getpid() != self._pid:
            return
        names = [each for each in question.get("worlds") or () if isinstance(each, str)]
        found = {
            "look": question["look"],
            "status": process_status(members=_members(question.get("members"))),
            "waits": waits_of(names, _WAITS),
        }
        client.report(fitting(found))

    def forked(self) -> None:
        """Close the parent's connection in a forked child."""
        if self.client is not None:
            self.client.close()


def _busy(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} busy: runs, but does not answer"
    return f"ranks {', '.join(map(str, ranks))} busy: run, but do not answer" if ranks else ""


def _sizes(name: str) -> str:
    """Return the sizes that a world of a range may have, as "MIN:MAX"; "" for one of a single size."""
    world = worlds().get(name)
    plan = None if world is None else world._plan  # noqa: SLF001  (joins make worlds)
    return "" if plan is None or not plan.assigned else f"{plan.least}:{plan.world_size}"


def _members(named: object) -> Collection[str] | None:
    """Return the names of worlds whose members are asked for; None: of all."""
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else None


class _Mine:
    """This process's reports, from the first question for them on."""

    def __init__(self) -> None:
        self._reports: LauncherReports | None = None
        self._lock = threading.Lock()
        self._alone = False  # there is no launcher

    def __call__(self) -> LauncherReports:
        if self._reports is None:
            with self._lock:
                if self._reports is None:
                    os.register_at_fork(after_in_child=self._forked)
                    self._reports = LauncherReports()
        return self._reports

    def connect_if_launched(self) -> None:
        """Connect with the launcher, if this process has one, and is not connected."""
        client = self().client
        if self._alone or (client is not None and client.alive):
            return
        try:
            self().connect(time.monotonic() + _CONNECTING)
        except LookupError as error:
            self._alone = True
            _log.info("no launcher is told of this process's worlds: %s", error)
        except OSError as error:  # the next join tries again
            _log.info("the launcher is not told of this process's worlds: %s", error)

    def _forked(self) -> None:
        """Drop the parent's connection in a forked child, which makes its own."""
        self._lock, self._alone = threading.Lock(), False
        if self._reports is not None:
            self._reports.forked()
            self._reports = LauncherReports()


reports = _Mine()
"""Return this process's `LauncherReports`."""

connect_if_launched: Callable[[], None] = reports.connect_if_launched
"""Connect with the launcher, if this process has one, and is not connected."""
