"""Watchdog: one thread per process that monitors the members of all its worlds.

The thread feeds socket events (`multiworld._net.liveness.sockets`) to the peer protocol
(`multiworld._core.liveness.peers`) and carries out the actions. Worlds that share a peer share its
connection.

A verdict is reported to its world by one call of ``on_verdict``, in the watchdog's thread. Any thread may
attach, report and leave; every wait has a deadline.

`WatchDog` (of `multiworld.notices`) is exported here because pymultiworld's programs import it from here.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld import settings
from multiworld._core.liveness.detector import WorldId, world_id
from multiworld._core.liveness.peers import MAX_UNAUTHENTICATED, Peers
from multiworld._core.liveness.wire import MAX_KEY
from multiworld._core.reraise import as_new
from multiworld._net.descriptor_table import IsolatedTable
from multiworld._net.liveness.attachment import Attachment
from multiworld._net.liveness.evidence import Helper
from multiworld._net.liveness.executor import Executor, feed, report
from multiworld._net.liveness.sockets import Sockets, unauthenticated_at_most
from multiworld._net.tls import credentials
from multiworld.errors import (
    InvalidJoinError,
    JoinAbandonedError,
    JoinError,
    MultiworldError,
)
from multiworld.events import Breakage, Cause
from multiworld.logs.aside import never_wait
from multiworld.logs.source import logger
from multiworld.notices import WatchDog

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._core.membership.roster import Endpoint, Roster

__all__ = ["Attachment", "Snapshot", "WatchDog", "Watchdog"]


_log = logger(__name__)
_LEAVE = 1.0
"""Seconds that `Attachment.leave` waits for the watchdog's thread, at most."""
_PROCESS = re.compile(r"[0-9a-f]{32}")
_LAST_PORT, _LAST_GENERATION = 0xFFFF, 0xFFFF_FFFF
_LONGEST_WAIT = 5.0  # seconds, while nothing is due
_HELPER_LATER = 300.0  # seconds at most between two starts of a helper that ends each time
_HELPER_AFTER = 0.2  # seconds from a world's readiness to the helper's start, which would delay joins
_POLL = 0.02  # seconds between two calls of `cancelled`, and between two looks whether the thread is needed


@dataclass(frozen=True)
class Snapshot:
    """Current state of a watchdog, for tests and diagnostics.

    Attributes:
        thread: whether its thread runs.
        worlds: keys of the attached worlds, sorted; one attached with two ranks is listed twice.
        listeners: number of addresses that it listens at.
        connections: number of connections, closing ones too, without early-close connections.
    """

    thread: bool
    worlds: tuple[str, ...]
    listeners: int
    connections: int


class Watchdog:
    """Monitors the members of a process's worlds.

    Args:
        process: id of this process, 32 hex digits; random by default.
        clock: monotonic seconds.
    """

    def __init__(self, *, process: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.process = secrets.token_hex(16) if process is None else process
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()  # guards the fields below; never held while waiting
        self._thread: threading.Thread | None = None
        self._sockets: Sockets | None = None
        self._table: IsolatedTable | None = None
        self._helper: Helper | None = None
        self._helper_at = math.inf
        self._helper_pause = _LONGEST_WAIT
        self._attachments: dict[WorldId, Attachment] = {}
        self._kept: set[object] = set()  # holds of `keep` that are not released yet
        self._commands: deque[Callable[[float], None]] = deque()
        self._done: deque[threading.Event] = deque()  # set when the actions so far are carried out
        self._channel = itertools.count(1).__next__
        self._turned = self._clock()
        self._peers = self._fresh_peers()

    def _fresh_peers(self) -> Peers:
        return Peers(
            self.process,
            nonce=lambda: secrets.token_bytes(16),
            channel=self._channel,
            unauthenticated=unauthenticated_at_most(MAX_UNAUTHENTICATED),
        )

    # -- any thread

    def endpoint(self, host: str) -> Endpoint:
        """Listen at `host` for members of future worlds, and hold the listener; one per address.

        Pair each call with one of `release_endpoint`. An attached world holds its endpoint itself, so release
        it as soon as `attach` returned.

        Args:
            host: numeric address of the interface that leads to the store; loopback for a loopback store.

        Raises:
            MultiworldError: it is not a numeric address of an interface of this host, or cannot be bound.
        """
        endpoint: Endpoint | None = None
        try:
            with self._lock:
                endpoint = self._running().listeners.listen(host)
        except BaseException:
            if endpoint is not None:  # Ctrl-C, as the lock is let go of
                self.release_endpoint(endpoint)
            raise
        return endpoint

    def release_endpoint(self, endpoint: Endpoint) -> None:
        """Release one hold of `endpoint`; the listener closes with the last one."""
        with self._lock:
            if self._sockets is not None:
                self._sockets.listeners.unlisten(endpoint)
                self._sockets.wake()
        self._join_if_idle()

    def stay_reachable(self, host: str) -> Callable[[], None]:
        """Hold the listener at `host`, as `endpoint` does; return what releases it, idempotent."""
        held = [self.endpoint(host)]

        def release() -> None:
            while held:
                self.release_endpoint(held.pop())

        return release

    def keep(self) -> Callable[[], None]:
        """Keep the thread up while a world is joined again; return a function that ends that, idempotent.

        A thread that ends waits for its closing connections, which a stopped process does not close, and the
        release of the broken world waits for the thread.
        """
        hold = object()
        with self._lock:
            self._kept.add(hold)

        def release() -> None:
            with self._lock:
                self._kept.discard(hold)  # none after `stop`, and in a forked child
                if self._sockets is not None:
                    self._sockets.wake()
            self._join_if_idle()

        return release

    def attach(
        self,
        roster: Roster,
        on_verdict: Callable[[Breakage], None],
        *,
        deadline: float,
        cancelled: Callable[[], bool] | None = None,
        on_busy: Callable[[tuple[int, ...], bool], None] | None = None,
        meanwhile: Callable[[Attachment, Callable[[], None]], None] = lambda *_: None,
        last_word: Callable[[BaseException], str] = lambda _: "",
    ) -> Attachment:
        """Connect to every member of a world, and monitor them from then on.

        Returns when every member is connected, has proved that it holds the world's token, and has accepted
        this process's proof. If this raises, nothing stays attached, and connected members are told.

        Args:
            roster: the generation; this process's member must have `process` and an endpoint held by
                `endpoint`.
            on_verdict: called once, in the watchdog's thread, when the world breaks; possibly before this
                returns. It must be quick. It is not called for a world that breaks while it is being
                attached.
            deadline: ``time.monotonic()`` seconds.
            cancelled: polled every 20 ms; True ends the attempt.
            on_busy: called in the same thread with the ranks of members that run without answering, and True;
                with False when they answer again.
            meanwhile: called while the watchdog connects, with the attachment and a function that it calls
                often, which raises once the attachment has failed.
            last_word: what connected members are told after an error, as by `Attachment.leave`.

        Raises:
            JoinTimeoutError: members are missing at the deadline; it names them.
            StaleGenerationError: a member is in a newer generation.
            JoinAbandonedError: `cancelled`, or a member crashed, left or gave up.
            InvalidJoinError: `roster` is not one for this watchdog, or attached already.
        """
        self._check(roster)
        attachment = Attachment(self, roster, on_verdict, on_busy)

        def check() -> None:
            if attachment.settled.is_set() or self._clock() >= deadline:
                error = self._await(attachment, deadline, cancelled)
                try:
                    if error is not None:
                        raise error
                finally:
                    del error  # it has this frame

        try:  # wherever an interrupt comes, nothing stays attached
            self._enlist(attachment)
            self._post(lambda now: self._peers.add(roster, now))
            meanwhile(attachment, check)
            error = self._await(attachment, deadline, cancelled)
        except BaseException as exc:
            self.detach(attachment, last_word(exc))
            raise
        try:
            if error is not None:
                self.detach(attachment, last_word(error))
                raise error
        finally:
            del error  # it has this frame
        return attachment

    def _enlist(self, attachment: Attachment) -> None:
        roster = attachment.roster
        with self._lock:
            if world_id(roster) in self._attachments:
                raise InvalidJoinError(
                    roster.world,
                    f"rank {roster.rank} of {roster.key} is attached already",
                    rule="Once is enough",
                )
            if not self._running().listeners.hold(roster.members[roster.rank].endpoint):
                raise InvalidJoinError(
                    roster.world,
                    f"this process does not listen at {roster.members[roster.rank].endpoint}",
                    rule="A member's endpoint is one that its watchdog opened",
                    next_step="Call endpoint() before the roster is made, release_endpoint() after attach()",
                )
            self._attachments[world_id(roster)] = attachment
            if self._helper is not None:
                self._helper.vouch(roster.token)

    def report(self, attachment: Attachment, detail: str, ranks: tuple[int, ...], *, deadline: float) -> None:
        """Report a failed operation, and wait for the verdict until `deadline`; see `Attachment.report`."""
        world = world_id(attachment.roster)
        self._post(lambda now: self._peers.report(world, ranks, detail, now))
        if not self._in_thread():
            attachment.ended.wait(max(0.0, deadline - self._clock()))

    def ask_to_read(self, attachment: Attachment, ranks: tuple[int, ...]) -> None:
        """Ask members to read what this one sent them; see `Attachment.ask_to_read`."""
        world = world_id(attachment.roster)
        self._post(lambda _: self._peers.unread_messages.ask(world, ranks))

    def ask(self, attachment: Attachment, number: int, *, deep: bool) -> None:
        """Ask the other members of a world what they are doing; see `Attachment.ask`.

        Raises:
            MultiworldError: this is the watchdog's thread, which cannot wait for itself.
        """
        if self._in_thread():
            raise MultiworldError(
                f"a question to the members of {attachment.roster.key} in the watchdog's thread",
                rule="Subscribers of events run in that thread, which hears the answers",
                next_step="Ask in another thread: World.on_break has one",
            )
        world = world_id(attachment.roster)

        def ask(_: float) -> None:
            self._peers.questions.ask(world, number, deep=deep)
            with self._lock:
                others = list(self._attachments.items())
            for (key, rank), other in others:
                if key == world[0] and other is not attachment:  # a member in this process, too
                    attachment.heard(number, rank, other.describe(deep=deep), last=True)

        self._post(ask)

    def detach(self, attachment: Attachment, failure: str = "") -> None:
        """Detach a world; see `Attachment.leave`."""
        attachment.detached = True
        with self._lock:
            known = self._attachments.get(world_id(attachment.roster)) is attachment
        if known:
            self._call(lambda now: self._remove(attachment, now, failure))
            self._join_if_idle()

    def linger(self, attachment: Attachment) -> Callable[[], None]:
        """Keep a broken world over its `detach`; see `Attachment.linger`."""
        with self._lock:
            attachment.lingering += 1
        ended = False

        def end() -> None:
            nonlocal ended
            with self._lock:
                if ended:
                    return
                ended = True
                attachment.lingering -= 1
            if attachment.detached:
                self._post(lambda now: self._remove(attachment, now))
                self._join_if_idle()

        return end

    def stop(self, deadline: float) -> bool:
        """Leave every world, close every socket and end the thread. The watchdog can be used again.

        Returns:
            Whether the thread had ended by `deadline` (``time.monotonic()`` seconds).
        """
        with self._lock:
            thread, sockets = self._thread, self._sockets
            attachments = list(self._attachments.values())
        if thread is None:
            return True

        def leave_all(now: float) -> None:
            with self._lock:
                self._kept.clear()
                for attachment in attachments:
                    attachment.lingering = 0
            for attachment in attachments:
                self._remove(attachment, now)
            if sockets is not None:
                sockets.listeners.unlisten_all()

        self._post(leave_all)  # dropped where the thread is ending by itself
        if self._in_thread():
            return False
        thread.join(max(0.0, deadline - self._clock()))
        return not thread.is_alive()

    def snapshot(self) -> Snapshot:
        """Return the current state."""
        with self._lock:
            sockets = self._sockets
            return Snapshot(
                thread=self._thread is not None and self._thread.is_alive(),
                worlds=tuple(
                    sorted(key for (key, _), each in self._attachments.items() if not each.detached)
                ),
                listeners=0 if sockets is None else len(sockets.listeners),
                connections=0 if sockets is None else sockets.open - self._peers.early_close.watched,
            )

    @property
    def secure(self) -> bool | None:
        """Whether its connections are TLS; None while there can be none."""
        with self._lock:
            return None if self._sockets is None else self._sockets.secure

    def still(self) -> float | None:
        """Return the seconds since its thread last turned, as it does every 5 s; None where none is needed.

        Infinite where a thread is needed, and has ended.
        """
        with self._lock:
            thread = self._thread
            if self._sockets is None and not self._attachments:
                return None
        if thread is None or not thread.is_alive():
            return math.inf
        return max(0.0, self._clock() - self._turned)

    # -- between the threads

    def _running(self) -> Sockets:
        """Start the thread if it does not run. The caller holds the lock."""
        if self._sockets is None:
            _hook(self)
            busy = settings.load().busy_timeout
            self._helper_at = math.inf
            self._peers.bear(busy)
            helper = self._helper = Helper() if busy else None
            sockets = self._sockets = Sockets(self._channel, self._clock, helper, credentials.current())
            table: IsolatedTable | None = None
            try:
                # First: the kernel ends threads in this order, and the last one frees the memory.
                if settings.load().early_close:
                    table = self._table = IsolatedTable.start()
                self._turned = self._clock()
                self._thread = threading.Thread(
                    target=self._run, args=(sockets, table, helper), name="m8d-watchdog", daemon=True
                )
                self._thread.start()
            except BaseException:  # no thread available, or Ctrl-C
                self._thread = self._sockets = self._table = self._helper = None
                sockets.shut_down()
                if table is not None:
                    table.close(_LEAVE)
                raise
        return self._sockets

    def _post(self, command: Callable[[float], None]) -> bool:
        """Queue `command` for the watchdog's thread; False where there is none."""
        with self._lock:
            if self._sockets is None:
                return False
            self._commands.append(command)
            self._sockets.wake()
            return True

    def _in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _check(self, roster: Roster) -> None:
        member = roster.members[roster.rank]
        if member.process != self.process:
            raise InvalidJoinError(
                roster.world,
                f"rank {roster.rank} of {roster.key} belongs to process {member.process}",
                rule=f"This watchdog attaches its own process's members: {self.process}",
            )
        if len(roster.key.encode()) > MAX_KEY:
            raise InvalidJoinError(
                roster.world, f"the name has {len(roster.world.encode())} bytes",
                rule=f"Name and generation together have at most {MAX_KEY} bytes of UTF-8",
                next_step="Choose a shorter name",
            )  # fmt: skip
        odd = [
            each for each in roster.members
            if not _PROCESS.fullmatch(each.process) or each.endpoint.port > _LAST_PORT
        ]  # fmt: skip
        if odd or roster.generation > _LAST_GENERATION:
            raise InvalidJoinError(
                roster.world,
                f"{roster.key} has members that cannot be: {odd}",
                rule="A process's id has 32 hex digits, a port 16 bits, a generation's number 32",
                next_step="See who else writes into the world's store",
            )

    def _await(
        self, attachment: Attachment, deadline: float, cancelled: Callable[[], bool] | None
    ) -> JoinError | None:
        name = attachment.roster.world
        while not attachment.settled.is_set():
            left = deadline - self._clock()
            if left <= 0:
                return self._timed_out(attachment)
            if cancelled is not None and cancelled():
                return JoinAbandonedError(name, f"the join of {attachment.roster.key} was cancelled")
            attachment.settled.wait(left if cancelled is None else min(left, _POLL))
        return None if attachment.error is None else as_new(attachment.error)

    def _timed_out(self, attachment: Attachment) -> JoinError:
        missing: dict[int, str] = {}
        self._call(lambda _: missing.update(self._peers.missing(world_id(attachment.roster))))
        return attachment.late(missing)

    def _call(self, command: Callable[[float], None]) -> None:
        """Run `command` in the watchdog's thread and wait for it, about a second at most."""
        done = threading.Event()

        def run(now: float) -> None:
            self._done.append(done)
            command(now)

        if self._post(run) and not self._in_thread():
            done.wait(_LEAVE)

    def _join_if_idle(self) -> None:
        """Wait until the thread, which ends by itself once nothing needs it, has ended or is needed again."""
        deadline = self._clock() + _LEAVE
        while not self._in_thread() and (left := deadline - self._clock()) > 0:
            with self._lock:
                thread = self._thread
                if self._needed(self._sockets) or thread is None or not thread.is_alive():
                    return
            thread.join(min(left, _POLL))

    def _needed(self, sockets: Sockets | None) -> bool:
        """Whether a world, a join or a listener needs the thread. The caller holds the lock."""
        listens = sockets is not None and len(sockets.listeners) > 0
        return bool(self._attachments or self._kept) or listens

    # -- the watchdog's thread

    def _run(self, sockets: Sockets, table: IsolatedTable | None, helper: Helper | None) -> None:
        never_wait()
        try:
            self._peers.early_close.own_wanted = table is not None and table.opened()
            self._loop(sockets, Executor(sockets, table), helper)
        except BaseException as error:  # noqa: BLE001  (logged, and its worlds break)
            _log.exception("the watchdog failed; its worlds are broken")
            self._give_up(f"this process's watchdog failed: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                if self._sockets is sockets:
                    self._sockets = None
            sockets.shut_down()
            if helper is not None:
                helper.close()
            if table is not None:
                table.close(_LEAVE)

    def _loop(self, sockets: Sockets, executor: Executor, helper: Helper | None) -> None:
        peers = self._peers
        before = self._clock()
        while not self._over(sockets):
            timeout = min(max(0.0, min(peers.wake(), self._helper_at) - before), _LONGEST_WAIT)
            events = sockets.wait(timeout)
            self._turned = now = self._clock()
            if now - before > timeout:
                peers.stalled(now - before - timeout, now)
            before = now
            for event in events:
                feed(peers, event, now)
            while self._commands:
                self._commands.popleft()(now)
            probes = {process: sockets.probe(channel) for process, channel in peers.suspects(now)}
            peers.settle(now, {process: each for process, each in probes.items() if each is not None})
            for attachment in executor.run(peers.take(), self._attachments):
                others = any(each.process != self.process for each in attachment.roster.members)
                if helper is not None and others:
                    self._helper_at = min(self._helper_at, self._clock() + _HELPER_AFTER)
            if helper is not None and self._helper_at <= now:
                pid = helper.pid
                helper.start()
                # Again where it has died since, and where its queue was full; ever later if it always dies.
                self._helper_pause = (
                    _LONGEST_WAIT if helper.pid == pid else min(2 * self._helper_pause, _HELPER_LATER)
                )
                self._helper_at = now + (_HELPER_AFTER if helper.behind else self._helper_pause)
            while self._done:
                self._done.popleft().set()

    def _over(self, sockets: Sockets) -> bool:
        """Whether nothing is left to do; the watchdog gives the thread up then."""
        with self._lock:
            if self._needed(sockets) or self._commands or sockets.closing:
                return False
            self._sockets = None
            return True

    def _remove(self, attachment: Attachment, now: float, failure: str = "") -> None:
        roster = attachment.roster
        world = world_id(roster)
        with self._lock:
            if self._attachments.get(world) is not attachment:
                return
            if attachment.lingering > 0 and attachment.breakage is not None:
                attachment.over()
                return
            del self._attachments[world]
            if self._helper is not None:
                self._helper.forget(roster.token)
            if self._sockets is not None:
                self._sockets.listeners.unlisten(roster.members[roster.rank].endpoint)
        # The members of a broken world were told already.
        self._peers.remove(world, goodbye=attachment.breakage is None, now=now, failure=failure)
        attachment.over()

    def _give_up(self, detail: str) -> None:
        """Break all worlds: the thread ends by a defect of this package, and nothing monitors them."""
        with self._lock:
            self._commands.clear()
            self._peers = self._fresh_peers()
            self._sockets = None
        breakage = Breakage(Cause.FAILED, (), detail, self._clock())
        for attachment in tuple(self._attachments.values()):
            report(attachment, breakage)
            attachment.over()
        self._attachments.clear()
        while self._done:
            self._done.popleft().set()

    # -- a forked child

    def forked(self) -> None:
        """Reset in a forked child: close its copies of the parent's descriptors, draw a new process id."""
        if self._sockets is not None:
            self._sockets.abandon()
        if self._helper is not None:
            self._helper.abandon()
        if self._table is not None:
            self._table.abandon()
        attachments = list(self._attachments.values())
        self.process = secrets.token_hex(16)
        self._reset()
        for attachment in attachments:
            attachment.forked()


_live: weakref.WeakSet[Watchdog] = weakref.WeakSet()
_hooked: list[int] = []


def _hook(watchdog: Watchdog) -> None:
    """Make forked children close their copies of this watchdog's descriptors.

    With a copy open in a child (a data loader's worker, for instance) the kernel does not close a killed
    parent's connections, and its peers detect only its silence.
    """
    _live.add(watchdog)
    if not _hooked:
        _hooked.append(os.getpid())
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for watchdog in list(_live):
        watchdog.forked()
