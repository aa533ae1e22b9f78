"""Sockets of the watchdog: listeners, connections, and one wait for all of them.

All sockets are non-blocking and belong to one thread; any thread may call `Sockets.wake` and use `listeners`.
Data is parsed into frames, which other modules interpret.
"""

from __future__ import annotations

import contextlib
import errno
import math
import resource
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld._core.liveness.detector import ConnectionEnd, Probe
from multiworld._core.liveness.wire import Frame, Parser, encode
from multiworld._net.liveness.evidence import Answered, Asker
from multiworld._net.liveness.listeners import Listener, Listeners, resolve
from multiworld._net.liveness.tcpinfo import probe
from multiworld._net.tls.session import Session
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._core.membership.roster import Endpoint
    from multiworld._net.liveness.evidence import Helper
    from multiworld._net.tls.credentials import Credentials

__all__ = ["Accepted", "Closed", "Connected", "Received", "SocketEvent", "Sockets", "unauthenticated_at_most"]

_SHARE = 8
"""Unauthenticated connections may hold one in eight of the process's descriptors."""

_CHUNK = 65536
_ACCEPTS = 16  # per wait, so that a flood of connections neither delays the members nor takes all descriptors
_READS = 16
_UNSENT = 1 << 20  # bytes kept for a peer that does not read, beyond the kernel's buffers
_LINGER = 0.25
"""Seconds that an orderly close waits for the other end to close too."""
_KEEP_ALIVE = 30  # seconds of silence before the kernels say something to each other
_PAUSE = 0.1  # seconds without accepting, when the process has no descriptor left
_TELL_EVERY = 10.0  # seconds between two words about strangers
_DEAD = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}

_log = logger(__name__)


@dataclass(frozen=True)
class Accepted:
    """A connection was accepted."""

    channel: int


@dataclass(frozen=True)
class Connected:
    """A dialed connection is established."""

    channel: int


@dataclass(frozen=True)
class Received:
    """`frames` arrived; `error`: why the bytes after them do not parse.

    `host`: of the other end, as its certificate names it; "" where there is none, or it names none.
    """

    channel: int
    frames: list[Frame]
    error: str | None
    host: str = field(default="", compare=False)


@dataclass(frozen=True)
class Closed:
    """A connection ended, or could not be made (`refused`: the port is closed).

    `plain`: it ended with end of file, as at the end of a process, not with a reset.
    """

    channel: int
    ending: ConnectionEnd
    refused: bool
    plain: bool = field(default=False, compare=False)


SocketEvent = Accepted | Connected | Received | Closed | Answered


class _Channel:
    """One connection."""

    def __init__(
        self, number: int, connection: socket.socket, tls: Session | None, *, connecting: bool
    ) -> None:
        self.number = number
        self.tls = tls
        self.socket = connection
        self.dialed = self.connecting = connecting
        self.parser = Parser()
        self.unsent = bytearray()
        self.error: int | None = None  # of a send; reported after all data was read
        self.until: float | None = None  # closing in good order until then
        self.shut = False
        self.events = 0

    def sealed(self, data: bytes) -> bytes:
        """Return what is to be written for `data`; nothing where TLS has failed, which is an `error` then."""
        try:
            return data if self.tls is None else self.tls.seal(data)
        except OSError as error:
            self.error = self.error or error.errno or errno.EPIPE
            return b""

    def opened(self, data: bytes) -> bytes:
        """Return what was sent, of what was read.

        Raises:
            OSError: the other end may not speak with this process.
        """
        if self.tls is None:
            return data
        try:
            return self.tls.open(data)
        finally:
            self.unsent += self.tls.seal(b"")  # of the handshake, or why it failed

    @property
    def host(self) -> str:
        """Of the other end, as its certificate names it; "" where it names none, or none was shown."""
        return "" if self.tls is None or self.tls.peer is None else self.tls.peer.host


class Sockets:
    """The watchdog's listeners and connections, and the wait for them.

    Args:
        channel: gives a fresh number for a connection.
        clock: seconds.
        helper: answers questions about this process; None for none.
        credentials: for TLS on all connections; None: they are plain.

    Attributes:
        listeners: of this process.
        asker: asks the helpers of peers.
    """

    def __init__(
        self,
        channel: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        helper: Helper | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._channel = channel
        self._credentials = credentials
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self.listeners = Listeners(self._selector, helper)
        self.asker = Asker(self._selector)
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._bell)
        self._channels: dict[int, _Channel] = {}
        self._resume_at: float | None = None
        self._tell_at = -math.inf
        self._unborn: list[SocketEvent] = []  # the ends of dials that never had a socket

    # -- any thread

    def wake(self) -> None:
        """End the current or the next `wait`."""
        # Full: a wake-up is pending. Closed: the thread has ended.
        with contextlib.suppress(OSError):
            self._rope.send(b"!")

    # -- the watchdog's thread

    @property
    def secure(self) -> bool:
        """Whether all connections are TLS."""
        return self._credentials is not None

    @property
    def open(self) -> int:
        """Number of connections, closing ones too."""
        return len(self._channels)

    @property
    def closing(self) -> int:
        """Number of connections that are closing in good order."""
        return sum(each.until is not None for each in self._channels.values())

    def dial(self, channel: int, endpoint: Endpoint) -> None:
        """Connect; `Connected` or `Closed` follows from `wait`, even for an immediate failure."""
        entry: _Channel | None = None
        try:
            family, address = resolve(endpoint.host, endpoint.port)
            session = self._session(server=False)
            connection = socket.socket(family, socket.SOCK_STREAM)
            entry = self._channels[channel] = _Channel(channel, connection, session, connecting=True)
            _prepare(connection)
            code = connection.connect_ex(address)
        except (OSError, ValueError, OverflowError) as error:  # the last: a port of another member's making
            code = getattr(error, "errno", None) or errno.EHOSTUNREACH
        if entry is None:
            # No descriptor, or no address: reported by the next wait.
            self._unborn.append(Closed(channel, ConnectionEnd.DEAD, refused=False))
            return
        if code not in {0, errno.EINPROGRESS}:
            entry.error = code
        self._watch(entry, selectors.EVENT_WRITE)

    def send(self, channel: int, frame: Frame, *, droppable: bool = False) -> None:
        """Send a frame, now if the kernel takes it; a `droppable` one not at all while others wait."""
        entry = self._channels.get(channel)
        if entry is None or entry.until is not None or (droppable and entry.unsent):
            return
        entry.unsent += entry.sealed(encode(frame))
        if not entry.connecting:
            self._flush(entry)

    def close(self, channel: int, *, orderly: bool) -> None:
        """Close; where `orderly`, flush first and give the other end 0.25 s to close too."""
        entry = self._channels.get(channel)
        if entry is None:
            return
        if not orderly or entry.connecting:
            self._discard(entry)
        else:
            entry.until = self._clock() + _LINGER
            self._flush(entry)

    def hand_over(self, channel: int, closing: Frame, take: Callable[[socket.socket, bytes], bool]) -> bool:
        """Pass the connection to `take`, which duplicates it, and close this copy without ending it.

        Args:
            channel: of the connection.
            closing: to be written before it is closed in good order; `take` gets its bytes.
            take: returns whether it took the connection.

        Returns:
            False where it was not taken, or cannot be; it is kept then.
        """
        entry = self._channels.get(channel)
        if entry is None or entry.unsent or entry.error is not None:
            return False
        last = entry.sealed(encode(closing))
        if entry.error is not None or not take(entry.socket, last):
            return False
        self._discard(entry)
        return True

    def probe(self, channel: int) -> Probe | None:
        """Return the kernel's state of the connection."""
        entry = self._channels.get(channel)
        return None if entry is None else probe(entry.socket)

    def wait(self, timeout: float | None) -> list[SocketEvent]:
        """Wait for events at most `timeout` seconds, and read all available data."""
        now = self._clock()
        ends = [each.until for each in self._channels.values() if each.until is not None]
        if self._resume_at is not None:
            ends.append(self._resume_at)
        if ends:
            left = max(0.0, min(ends) - now)
            timeout = left if timeout is None else min(timeout, left)
        events, self._unborn = self._unborn, []
        for key, mask in self._selector.select(0.0 if events else timeout):
            if isinstance(key.data, _Channel):
                self._serve(key.data, mask, events)
            elif isinstance(key.data, Listener):
                self._accept(key.data, events)
            elif key.data is self.asker:
                events += self.asker.read()
            else:
                _drain(self._bell)
        self._tidy(self._clock())
        return events

    def shut_down(self) -> None:
        """Close everything immediately."""
        self.listeners.shut_down()
        for entry in self._channels.values():
            entry.socket.close()
        self._channels.clear()
        self.asker.close()
        self._selector.close()
        self._bell.close()
        self._rope.close()

    def abandon(self) -> None:
        """Close a forked child's copies of the descriptors; the parent's connections go on.

        No `unregister`: the parent's selector would lose them too.
        """
        self.listeners.abandon()
        for entry in tuple(self._channels.values()):
            entry.socket.close()
        self.asker.close()
        self._selector.close()
        self._bell.close()
        self._rope.close()

    # -- inside

    def _serve(self, entry: _Channel, mask: int, events: list[SocketEvent]) -> None:
        if self._channels.get(entry.number) is not entry:
            return
        if entry.connecting:
            self._finish_connect(entry, events)
            return
        if mask & selectors.EVENT_READ:
            self._read(entry, events)
        if mask & selectors.EVENT_WRITE and self._channels.get(entry.number) is entry:
            self._flush(entry)

    def _finish_connect(self, entry: _Channel, events: list[SocketEvent]) -> None:
        code = entry.error
        if code is None:
            code = entry.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and _is_itself(entry.socket):
            code = errno.ECONNREFUSED
        if code:
            self._discard(entry)
            events.append(Closed(entry.number, ConnectionEnd.DEAD, refused=code == errno.ECONNREFUSED))
            return
        entry.connecting = False
        entry.unsent += entry.sealed(b"")  # the handshake begins
        self._watch(entry, selectors.EVENT_READ)
        events.append(Connected(entry.number))
        self._flush(entry)

    def _read(self, entry: _Channel, events: list[SocketEvent]) -> None:
        frames: list[Frame] = []
        ending: ConnectionEnd | None = None
        refused: str | None = None
        plain = False
        for _ in range(_READS):
            try:
                data = entry.socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                ending = _ending(error.errno)
                break
            count = len(data)
            if not count:
                ending = _ending(entry.error)
                plain = entry.error is None
                break
            try:
                data = entry.opened(data)
            except OSError as error:
                refused = f"TLS: {error.strerror or error}"
                self._tell(entry, refused)
                break
            if entry.until is None:
                frames += entry.parser.feed(data)
            if count < _CHUNK and entry.error is None:
                # Less than asked for: the socket is empty. An end of file makes it readable again.
                break
        parting = entry.until is not None
        error_text = refused or entry.parser.error
        if ending is not None:
            self._discard(entry)
        elif entry.unsent:
            self._flush(entry)
        if parting:
            return
        if frames or error_text is not None:
            events.append(Received(entry.number, frames, error_text, entry.host))
        if ending is not None:
            events.append(Closed(entry.number, ending, refused=False, plain=plain))

    def _tell(self, entry: _Channel, why: str) -> None:
        """Log why a stranger was refused, now and then; of those that were dialed a join tells."""
        stranger = not entry.dialed and entry.tls is not None and entry.tls.peer is None
        if stranger and (now := self._clock()) >= self._tell_at:
            self._tell_at = now + _TELL_EVERY
            _log.warning("a connection to the watchdog is refused: %s", why)

    def _flush(self, entry: _Channel) -> None:
        while entry.unsent and entry.error is None:
            try:
                sent = entry.socket.send(entry.unsent)
            except BlockingIOError:
                break
            except OSError as error:
                # Reported by the read side: data that the peer sent before comes first.
                entry.error = error.errno or errno.EPIPE
                break
            del entry.unsent[:sent]
        if entry.error is not None:
            entry.unsent.clear()
            if entry.until is None:
                with contextlib.suppress(OSError):  # makes the socket readable in any state
                    entry.socket.shutdown(socket.SHUT_RD)
        elif len(entry.unsent) > _UNSENT:
            entry.error = errno.ENOBUFS
            with contextlib.suppress(OSError):
                entry.socket.shutdown(socket.SHUT_RD)
        if entry.until is not None and not entry.unsent and not entry.shut:
            entry.shut = True
            with contextlib.suppress(OSError):  # the other end closed first
                entry.socket.shutdown(socket.SHUT_WR)
        self._watch(entry, selectors.EVENT_READ | (selectors.EVENT_WRITE if entry.unsent else 0))

    def _accept(self, listener: Listener, events: list[SocketEvent]) -> None:
        for _ in range(_ACCEPTS):
            session = self._session(server=True)
            try:
                connection, _ = listener.socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                if listener.socket.fileno() >= 0:  # else it was closed a moment ago
                    self._pause()
                return
            entry = _Channel(self._channel(), connection, session, connecting=False)
            self._channels[entry.number] = entry
            _prepare(connection)
            self._watch(entry, selectors.EVENT_READ)
            events.append(Accepted(entry.number))

    def _session(self, *, server: bool) -> Session | None:
        """Return TLS for a socket that is made next.

        It may read files: a child that is forked meanwhile would not find a socket that is in no channel yet.
        """
        return None if self._credentials is None else Session(self._credentials, server=server)

    def _pause(self) -> None:
        """Stop accepting for a moment: without free descriptors the listeners stay readable."""
        self.listeners.pause()
        self._resume_at = self._clock() + _PAUSE

    def _tidy(self, now: float) -> None:
        for entry in [
            each for each in self._channels.values() if each.until is not None and each.until <= now
        ]:
            self._discard(entry)
        if self._resume_at is not None and self._resume_at <= now:
            self._resume_at = None
            self.listeners.resume()

    def _watch(self, entry: _Channel, events: int) -> None:
        if entry.events == events:
            return
        if entry.events:
            self._selector.modify(entry.socket, events, entry)
        else:
            self._selector.register(entry.socket, events, entry)
        entry.events = events

    def _discard(self, entry: _Channel) -> None:
        if entry.events:
            self._selector.unregister(entry.socket)
        # Closed first: a child that is forked between the two finds it here, and closes its copy.
        entry.socket.close()
        del self._channels[entry.number]


def unauthenticated_at_most(most: int) -> int:
    """Return the bound on unauthenticated connections: `most`, or an eighth of this process's descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // _SHARE))


def _ending(code: int | None) -> ConnectionEnd:
    if code == errno.ENOBUFS:
        return ConnectionEnd.STUCK
    return ConnectionEnd.DEAD if code in _DEAD else ConnectionEnd.LOST


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Early-close connections are idle: keepalives keep firewalls and NAT from dropping them.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE)


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):  # empty
        while sock.recv(4096):
            continue


def _is_itself(sock: socket.socket) -> bool:
    """Whether TCP connected a socket to itself: the peer's port is free and was picked as our own."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # the peer is gone already, which the next read tells
        return False
