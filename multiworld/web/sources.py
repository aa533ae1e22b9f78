"""Sources of the page's data: this process, or a launcher of a run.

A source may block, within its own deadlines.
"""

from __future__ import annotations

import math
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from multiworld._net.blocking import BlockingCall
from multiworld.errors import MultiworldError, UnknownWorldError
from multiworld.run.control.client import LauncherSilentError, look, own_snapshot, snapshots
from multiworld.run.control.pending import blocked_operations, waiting_worlds, waits_in
from multiworld.web.run_view import RunViews, complete

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiworld.metrics.health import Health

__all__ = ["LaunchedRun", "RunOverError", "Source", "ThisProcess", "tail"]

_TIMEOUT = 2.0
_ASKING = 2.0
"""Seconds, longer than the launcher waits for its workers."""

_MOST_ASKED = 3
"""Workers that are asked for a world's pending operations, one after the other."""

_SCRAPED = 4.0
"""Seconds for what a scrape asks: twice as long as the launcher waits for its workers, and something more."""

_OLD = 3.0
"""Seconds after which what workers said is waited for anew, for `_PATIENCE` at most: no page was open."""
_PATIENCE = 1.0

_SILENT = 5.0
"""Seconds without an answer after which it is said that another node's launcher does not."""
_FORGOTTEN = 60.0

FRESH = 0.2

_MOST_LOG = 4 << 20


class RunOverError(MultiworldError):
    """The launcher has ended."""


class Source(Protocol):
    """See the module."""

    def view(self) -> dict[str, Any]:
        """Return the present view."""

    def pending(self, world: str) -> list[dict[str, Any]]:
        """Ask the members of a world what they wait for.

        Raises:
            UnknownWorldError: there is none of that name.
        """

    def log(self, process: str, stream: str, most: int) -> bytes:
        """Return the end of a process's log, at most so many bytes.

        Raises:
            FileNotFoundError: there is none.
        """

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the body and the content type of ``/metrics``."""

    def live(self) -> Health:
        """Whether it works at all."""

    def ready(self, worlds: Sequence[str]) -> Health:
        """Whether these worlds, or all, can be worked in."""


def tail(path: Path, most: int) -> bytes:
    """Return the end of a file, from the beginning of a line on where it is longer than `most` bytes."""
    most = max(1, min(most, _MOST_LOG))
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        found = file.read(most)
    cut = found.find(b"\n") + 1 if size > most else 0
    return found[cut:]


class _Asked(NamedTuple):
    """What workers and other launchers said.

    Attributes:
        at: seconds of the clock.
        workers: answers of `multiworld.run.control.client.look`.
        others: snapshots of the other nodes' launchers.
    """

    at: float
    workers: list[dict[str, Any]]
    others: list[dict[str, Any]]


class LaunchedRun:
    """A run, as one of its launchers on this host knows it. Any thread may ask.

    The launcher itself answers at once. Its workers and the other launchers are asked in the background: one
    that is stopped must not hold the page back.

    Args:
        path: of the launcher's control socket.
        clock: ``time.monotonic``, or a test's.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._views = RunViews()
        self._snapshot: dict[str, Any] | None = None
        self._asking: BlockingCall[_Asked] | None = None
        self._asked = _Asked(-math.inf, [], [])
        self._others: dict[str, tuple[float, dict[str, Any]]] = {}
        self._answered = clock()
        self._trouble = ""  # of this node's launcher
        self._made: tuple[float, dict[str, Any] | Exception] = (-math.inf, {})

    def view(self) -> dict[str, Any]:
        """Return the present view; while the launcher does not answer, the last one with a note.

        What was found, or why nothing was, holds for `FRESH` seconds: those that ask at once share it.

        Raises:
            RunOverError, LauncherSilentError: it has never answered.
        """
        with self._lock:
            at, found = self._made
            if self._clock() - at >= FRESH:
                try:
                    found = self._make()
                except (RunOverError, LauncherSilentError) as error:
                    found = error
                self._made = self._clock(), found
        if isinstance(found, Exception):
            raise found
        return found

    def _make(self) -> dict[str, Any]:
        snapshot = self._last()
        if not self._trouble:
            self._ask_the_others(bool(snapshot["peers"]))
        others, silent = self._known_others(snapshot)
        note = "; ".join([self._trouble, *silent] if self._trouble else silent)
        return self._views.view(snapshot, others, *self._told(snapshot), note)

    def _last(self) -> dict[str, Any]:
        """Return the launcher's snapshot; while it does not answer, the last one, and there is trouble."""
        self._trouble = ""
        try:
            self._snapshot = self._own()
        except (RunOverError, LauncherSilentError) as error:
            if self._snapshot is None:
                raise
            self._trouble = f"nothing new since {self._clock() - self._answered:.0f} s: {error}"
            return {**self._snapshot, "now": time.time()}
        self._answered = self._clock()
        return self._snapshot

    def _own(self) -> dict[str, Any]:
        after = 0 if self._snapshot is None else self._views.seen(self._snapshot)
        found = own_snapshot(self._path, _TIMEOUT, after)
        if found is None:
            raise RunOverError(
                f"the launcher at {self._path} has ended",
                rule="The page shows a run as long as one of its launchers lives",
                next_step="See the run's log",
            )
        if not complete(found):
            raise LauncherSilentError("it is of another version of multiworld than the page")
        return found

    def _known_others(self, snapshot: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the snapshots of the nodes that are not lost, the last one of each, and who is silent."""
        seated = {each["node"] for each in snapshot["peers"] if each["state"] != "lost"}
        now = self._clock()
        self._others = {
            key: (at, each)
            for key, (at, each) in self._others.items()
            if each["node"] in seated and now - at < _FORGOTTEN
        }
        answered = {each["node"]: at for at, each in self._others.values()}
        began = snapshot["started"] is not None and time.time() - snapshot["started"] > _OLD
        silent = [
            f"the launcher on {node} does not answer"
            for node in sorted(seated)
            if began and self._asked.at > -math.inf and now - answered.get(node, -math.inf) > _SILENT
        ]
        return [each for _, each in self._others.values()], silent

    def _told(self, snapshot: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Return what the workers that live said, and what waits in their worlds."""
        attempts = {each["rank"]: each["attempt"] for each in snapshot["workers"]}
        told = [each for each in self._asked.workers if attempts.get(each["rank"]) == each["attempt"]]
        return {each["rank"]: each["status"] for each in told}, waits_in(told)

    def _ask_the_others(self, peers: bool) -> None:
        if self._asking is None:
            self._asking = BlockingCall(partial(self._ask, self._asked, peers), name="m8d-web-look")
        old = self._clock() - self._asked.at > _OLD
        if self._asking.wait(_PATIENCE if old else 0.0):
            asking, self._asking = self._asking, None
            self._asked = asking.result()
            for each in self._asked.others:
                self._others[f"{each['node']}/{each['started']}"] = self._asked.at, each

    def _ask(self, before: _Asked, peers: bool) -> _Asked:
        statuses = {each["rank"]: each["status"] for each in before.workers}
        # At first all say who their worlds' members are, then only where that is not known.
        members = self._views.rosters.lacking(statuses) if before.workers else None
        try:
            workers = look(self._path, waiting_worlds(statuses), _ASKING, members) or []
            # Not of a run of one node: the launcher would make its own snapshot once more for it.
            others = (snapshots(self._path, _ASKING) or [])[1:] if peers else []
        except LauncherSilentError:
            workers, others = [], []
        return _Asked(self._clock(), workers, [each for each in others if complete(each)])

    def pending(self, world: str) -> list[dict[str, Any]]:
        """Ask a worker of this node that is in the world, and another one where the first does not answer.

        One that waits longest is asked first. A worker that joins the world, or has it broken, knows nothing.
        """
        self.view()
        with self._lock:
            found = [
                (-each.get("waits", 0.0), worker["rank"], each["state"])
                for worker in self._asked.workers
                for each in worker["status"]["worlds"]
                if each["name"] == world
            ]
        if not found:
            raise _unknown(world)
        for _, rank, _ in sorted(each for each in found if each[2] == "active")[:_MOST_ASKED]:
            told = waits_in(look(self._path, {str(rank): [world]}, _ASKING, {}) or [])
            if world in told:
                return list(told[world]["pending"])
        return []

    def log(self, process: str, stream: str, most: int) -> bytes:
        """Return the end of a worker's log file."""
        path = self._log_path(process, stream)
        if path is None:
            self.view()  # it may have been started after the last look
            path = self._log_path(process, stream)
        if path is None:
            raise FileNotFoundError(f"{process} has no log {stream!r}")
        return tail(path, most)

    def _log_path(self, process: str, stream: str) -> Path | None:
        snapshot = self._snapshot or {"workers": (), "node": ""}
        for each in snapshot["workers"]:
            if f"{snapshot['node']}/{each['pid']}" == process and stream in each.get("logs", {}):
                return Path(each["logs"][stream])
        return None

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the run's numbers.

        Who waits is asked anew: between two scrapes what the page was told before is long over.
        """
        from multiworld.web.run_metrics import exposition_of_run  # noqa: PLC0415  (needs prometheus_client)

        found = blocked_operations(self._path, _SCRAPED)
        waits = {name: {"pending": rows, "waited": {}} for name, rows in found.items()}
        with self._lock:
            # Each launcher counts its own: what several said would be counted by all of them.
            view = RunViews().view(self._last(), (), {}, waits, self._trouble)
        return exposition_of_run(view, accept)

    def live(self) -> Health:
        """Whether the launcher answers."""
        from multiworld.metrics.health import Health  # noqa: PLC0415  (only probes ask)

        try:
            self.view()
        except (RunOverError, LauncherSilentError) as error:
            return Health(False, str(error))
        # Another node that is silent is no reason to start this one again.
        return Health(not self._trouble, self._trouble or "ok")

    def ready(self, worlds: Sequence[str]) -> Health:
        """Whether these worlds are active, or all that this node's workers have not closed.

        A world that the worlds file has and no worker has begun to join is not, and neither is one of which a
        worker failed. One that no worlds file has, and whose join failed, does not count. A node that waits
        for others is not ready; a spare one is.
        """
        from multiworld.metrics.health import Health  # noqa: PLC0415  (only probes ask)

        try:
            view = self.view()
        except (RunOverError, LauncherSilentError) as error:
            return Health(False, str(error))
        states = {each["name"]: each["state"] for each in view["worlds"]}
        with self._lock:
            own = self._snapshot or {}
        bad = []
        if not worlds:
            # What breaks elsewhere is no reason to send no work here; what was closed here breaks elsewhere.
            worlds = [
                each["name"]
                for each in own["worlds"]
                if not all(_is_done(of) for of in each["members"]) and states.get(each["name"]) != "closed"
            ]
            bad += [f"{name}: not joined" for name in own.get("awaited", ())]
            if not own["nodes"]:
                bad.append("it waits for the other nodes")
        bad += [f"{name}: {states.get(name, 'not known')}" for name in worlds if states.get(name) != "active"]
        if self._trouble:
            bad.append(self._trouble)
        return Health(not bad, "; ".join(bad) or "ok")


def _is_done(member: dict[str, Any]) -> bool:
    """Whether a worker has closed a world, or could not join one that no worlds file has."""
    failed = member["state"] == "failed" and not member["generation"] and "place" not in member
    return failed or member["state"] == "closed"


class ThisProcess:
    """The worlds of this process; `close` ends its subscription."""

    def __init__(self) -> None:
        from multiworld import metrics, status  # noqa: PLC0415  (the page of a run needs no worlds)
        from multiworld.events import subscribe  # noqa: PLC0415  (the page of a run needs no worlds)
        from multiworld.web.links import Links  # noqa: PLC0415  (the page of a run needs no worlds)
        from multiworld.web.process_view import EventTrack, view_of_process  # noqa: PLC0415  (the page of a run needs no worlds)

        metrics.begin()
        self._status, self._make = status, view_of_process
        self._links = Links()
        self._track = EventTrack(lambda: time.time() - time.monotonic())
        self.close = subscribe(self._track.apply)

    def view(self) -> dict[str, Any]:
        """Return the present view."""
        found = self._status.process_status()
        asked = waiting_worlds({0: found}).get("0", [])
        return self._make(found, self._track, self._status.waits_of(asked, 1.0), self._links)

    def pending(self, world: str) -> list[dict[str, Any]]:
        """Ask its members."""
        if all(each["name"] != world for each in self._status.process_status()["worlds"]):
            raise _unknown(world)
        found = self._status.waits_of([world], 1.0).get(world)
        return [] if found is None else list(found["pending"])

    def log(self, process: str, stream: str, most: int) -> bytes:  # noqa: ARG002  (the signature of all sources)
        """Raise FileNotFoundError: a process does not know where its output goes."""
        raise FileNotFoundError(
            f"{process}: a launcher knows its workers' log files; this page is a process's own"
        )

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return this process's numbers."""
        from multiworld.metrics import exposition  # noqa: PLC0415  (needs prometheus_client)

        return exposition(accept)

    def live(self) -> Health:
        """Whether this process works at all."""
        from multiworld.metrics import health  # noqa: PLC0415  (only probes ask)

        return health.live()

    def ready(self, worlds: Sequence[str]) -> Health:
        """Whether these worlds, or all of this process, can be worked in."""
        from multiworld.metrics import health  # noqa: PLC0415  (only probes ask)

        return health.ready(worlds)


def _unknown(world: str) -> UnknownWorldError:
    return UnknownWorldError(
        world,
        f"world {world!r} is not known here",
        rule="The page has the worlds of its process, or of its run's workers on this host",
        next_step="See /api/v1/view for their names",
    )
