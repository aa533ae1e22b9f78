"""Meeting of a generation's members: their lanes are connected while they join.

Each dials all members of lower rank and accepts those of higher rank. One thread does it all, the caller's.
"""

from __future__ import annotations

import errno
import os
import select
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld._core.reraise import raised_by_the_program
from multiworld._net.lane.dialing import dials
from multiworld._net.lane.door import end
from multiworld._net.lane.greeter import Greeter
from multiworld.errors import JoinTimeoutError, MultiworldError
from multiworld.logs.source import logger

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from multiworld._core.membership.roster import Roster
    from multiworld._net.lane.dialing import Dial
    from multiworld._net.lane.door import Door
    from multiworld._net.lane.memory import MemoryReader
    from multiworld._net.tls.credentials import Credentials
    from multiworld._net.tls.stream import Stream

__all__ = ["Met", "meet"]

_log = logger(__name__)

_CHECK_EVERY = 0.01  # seconds
_STRANGERS = 16  # accepted connections beyond the world's size whose handshake goes on at a time
_IDLE = 2.0  # seconds without a byte until an accepted connection is dropped
_ANONYMOUS = 1.0  # seconds that it may take in secure mode until it has shown its certificate
_BACKLOG = 4096  # more than a flood brings at once: TCP repeats a dial that finds no room only after a second
_ACCEPTS = 16  # per turn, so that a flood of connections does not delay the members
_NO_ACCEPTS = 0.02  # seconds without accepting where the process has no descriptor left
_ENDED = select.POLLRDHUP | select.POLLERR | select.POLLHUP | select.POLLNVAL


@dataclass(frozen=True)
class Met:
    """What a meeting yields.

    Attributes:
        connections: connected, authenticated, non-blocking sockets, by the rank of the other end; all other
            members are there. They are the caller's.
        readers: of the members whose memory can be read, by rank.
    """

    connections: dict[int, Stream]
    readers: dict[int, MemoryReader]


def meet(
    door: Door,
    roster: Roster,
    *,
    deadline: float,
    check: Callable[[], None],
    credentials: Credentials | None = None,
) -> Met:
    """Connect with every other member.

    If this raises, no connection stays open. The door stays the caller's, and goes on listening until it is
    closed.

    Args:
        door: this member's, whose address is in the roster.
        roster: the generation, in which all members have lanes.
        deadline: ``time.monotonic()`` seconds.
        check: called every 10 ms; raises to end the meeting.
        credentials: in secure mode: TCP connections are TLS.

    Raises:
        JoinTimeoutError: members are missing at the deadline; it names them.
        MultiworldError: in a forked child of the process that opened the door.
        OSError: the door is closed.
    """
    meeting = _Meeting(door, roster, credentials)
    try:
        meeting.run(deadline, check)
        met = meeting.met()
    except BaseException:
        meeting.close()
        raise
    return met


class _Meeting:
    def __init__(self, door: Door, roster: Roster, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._door = door
        self._roster = roster
        self._poll = select.poll()
        self._greeters: dict[int, Greeter] = {}  # by descriptor: their handshakes go on
        self._accepted: dict[int, Greeter] = {}  # those of them that were not dialed, the oldest first
        self._connected: dict[int, Greeter] = {}  # by rank
        self._ranks: dict[int, int] = {}  # by descriptor: of those that are connected
        self._dials = dials(roster, time.monotonic())
        self._accept_from: float | None = None  # when accepting goes on; None if it does
        self._known: set[int] = set()  # ranks that are or were connected
        self._trouble = ""  # why nothing can be accepted

    def run(self, deadline: float, check: Callable[[], None]) -> None:
        self._door.listen(_BACKLOG)
        self._listen()
        check_at = time.monotonic() + _CHECK_EVERY
        while len(self._connected) < self._roster.size - 1:
            if os.getpid() != self._door.pid:
                raise MultiworldError(
                    f"process {os.getpid()} was forked while {self._roster.key} was joined",
                    rule="Only the process that began to join goes on",
                    next_step="Join the world in the child anew",
                )
            now = time.monotonic()
            if now >= deadline:
                raise self._late()
            if now >= check_at:
                check()
                check_at = time.monotonic() + _CHECK_EVERY
            self._keep_times(now)
            self._wait(min(deadline, check_at))

    def met(self) -> Met:
        """Return those that are connected, and close what strangers have begun."""
        while self._greeters:
            _, greeter = self._greeters.popitem()
            end(greeter.socket, self._door.pid)
        connected = sorted(self._connected.items())
        readers = {rank: each.reader for rank, each in connected}
        return Met(
            {rank: each.socket for rank, each in connected},
            {rank: reader for rank, reader in readers.items() if reader is not None},
        )

    def close(self) -> None:
        for each in (*self._greeters.values(), *self._connected.values()):
            end(each.socket, self._door.pid)

    # -- time ------------------------------------------------------------------------------------------------

    def _keep_times(self, now: float) -> None:
        """Do what is due."""
        if self._accept_from is not None and now >= self._accept_from:
            self._listen()
        for each in list(self._accepted.values()):
            if now >= each.active + _IDLE:
                self._drop(each, "nothing came from it")
            elif each.anonymous and now >= each.begun + _ANONYMOUS:
                self._drop(each, "it has not shown a certificate")
        for dial in self._dials.values():
            if dial.due is not None and now >= dial.due:
                self._dial(dial, now)

    def _wait(self, until: float) -> None:
        """Wait for events, but not longer than until the next thing is due; and handle them."""
        due = (dial.due for dial in self._dials.values() if dial.due is not None)
        seconds = min(until, *due, self._accept_from or until) - time.monotonic()
        if 0 < seconds < 0.001:  # poll takes whole milliseconds
            time.sleep(seconds)
            seconds = 0
        events = self._poll.poll(max(0.0, seconds * 1000))
        now = time.monotonic()
        listeners = {each.fileno(): each for each in self._door.sockets}
        for fd, event in events:
            if (greeter := self._greeters.get(fd)) is not None:
                self._go_on(greeter, now)
            elif fd in self._ranks and event & _ENDED:
                self._lose(self._connected[self._ranks[fd]])
            elif fd in listeners:
                self._accept(listeners[fd], now)
            elif event & select.POLLNVAL:  # it would be told at once again, until the deadline
                raise OSError(errno.EBADF, "The door was closed while its member joined")

    # -- dialing and accepting -------------------------------------------------------------------------------

    def _dial(self, dial: Dial, now: float) -> None:
        try:
            connection = dial.start(now)
        except OSError as error:
            if raised_by_the_program(error):
                raise
            dial.again(error.strerror or str(error))
        else:
            self._begin(connection, dial.rank, now)

    def _accept(self, listener: socket.socket, now: float) -> None:
        for _ in range(_ACCEPTS):
            if self._accept_from is not None:  # since an event before this one
                return
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if raised_by_the_program(error):
                    raise
                if isinstance(error, (BlockingIOError, ConnectionAbortedError)):
                    return
                # Without free descriptors the listeners stay readable.
                _log.debug("%s: nothing is accepted for a moment: %s", self._roster.key, error)
                for each in self._door.sockets:
                    self._poll.unregister(each)
                self._accept_from = now + _NO_ACCEPTS
                self._trouble = error.strerror or str(error)
                return
            self._trouble = ""
            connection.setblocking(False)
            if len(self._accepted) >= self._roster.size + _STRANGERS:
                self._drop(next(iter(self._accepted.values())), "too many others came after it")
            self._begin(connection, None, now)

    def _listen(self) -> None:
        self._accept_from = None
        for each in self._door.sockets:
            self._poll.register(each, select.POLLIN)

    # -- handshakes ------------------------------------------------------------------------------------------

    def _begin(self, connection: socket.socket, dialed: int | None, now: float) -> None:
        try:
            greeter = Greeter(connection, self._roster, dialed, now, self._credentials)
            self._greeters[connection.fileno()] = greeter
            if dialed is None:
                self._accepted[connection.fileno()] = greeter
        except BaseException:
            end(connection, self._door.pid)
            raise
        self._poll.register(connection, greeter.events)
        self._go_on(greeter, now)

    def _go_on(self, greeter: Greeter, now: float) -> None:
        if greeter.peer in self._connected:
            self._drop(greeter, f"rank {greeter.peer} is connected already")
            return
        try:
            greeter.go_on(now)
        except OSError as error:  # a GreetingError is one
            if raised_by_the_program(error):
                raise
            self._drop(greeter, error.strerror or str(error))
            return
        if greeter.over:
            self._finish(greeter)
        else:
            self._poll.modify(greeter.socket, greeter.events)

    def _finish(self, greeter: Greeter) -> None:
        rank, fd = greeter.peer, greeter.socket.fileno()
        assert rank is not None  # noqa: S101  (its handshake is over)
        self._forget(fd)
        self._connected[rank], self._ranks[fd] = greeter, rank
        self._known.add(rank)
        self._poll.modify(greeter.socket, _ENDED)

    def _drop(self, greeter: Greeter, why: str) -> None:
        """Close a connection whose handshake goes on."""
        _log.debug("%s: a connection of the lane is dropped: %s", self._roster.key, why)
        self._forget(greeter.socket.fileno())
        self._close(greeter, why)

    def _forget(self, fd: int) -> None:
        del self._greeters[fd]
        self._accepted.pop(fd, None)

    def _lose(self, greeter: Greeter) -> None:
        """A connection has ended whose handshake was over: its member may come again."""
        rank = self._ranks.pop(greeter.socket.fileno())
        del self._connected[rank]
        self._close(greeter, "its connection ended")

    def _close(self, greeter: Greeter, why: str) -> None:
        self._poll.unregister(greeter.socket)
        end(greeter.socket, self._door.pid)
        if greeter.dialed is not None:
            self._dials[greeter.dialed].again(why)

    def _late(self) -> JoinTimeoutError:
        told = []
        missing = set(range(self._roster.size)) - {self._roster.rank, *self._connected}
        # Those that came, and have left at the deadline, miss the same ones.
        for rank in sorted(missing - self._known or missing):
            member, dial = self._roster.members[rank], self._dials.get(rank)
            note = self._trouble if dial is None else dial.trouble
            place = f"pid {member.pid} on {member.hostname}, {member.endpoint.host}"
            told.append(f"{rank} ({place}{': ' + note if note else ''})")
        who = f"rank{'' if len(told) == 1 else 's'} {', '.join(told)} of {self._roster.key}"
        return JoinTimeoutError(
            self._roster.world,
            f"{who} did not connect the lane in time",
            rule="Every member connects to every other one before the timeout",
            next_step="See that no firewall stands between the members, and set M8D_HOST or M8D_IFNAME where "
            "an address is not the one that the others reach",
        )
