"""Store server in secure mode: TCPStore's protocol over mutual TLS 1.3, in one thread.

Its connections have descriptors of the process. So strangers, which have not finished their handshake, are
few at a time, and have a second each: what comes beyond makes the oldest go. A connection of a member stays;
while the member does not read its replies, nothing more is read from it. A forked child closes its copies.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

from multiworld._net.liveness.sockets import unauthenticated_at_most
from multiworld._net.stores.listening import listening
from multiworld._net.stores.queries import Dialogue
from multiworld._net.tls.session import Session
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from multiworld._net.tls.credentials import Credentials

__all__ = ["TlsStoreServer"]

_PATIENCE = 1.0
"""Seconds that a stranger has for its handshake."""

_STRANGERS = 256
"""At a time, at most."""

_ACCEPTS = 16  # per turn, so that a flood of connections does not delay the members
_CHUNK = 65536
_UNSENT = 1 << 20  # bytes of replies from which on a connection is not read
_PAUSE = 0.1  # seconds without accepting, when the process has no descriptor left
_STALL = 0.25  # seconds beyond its wait that count in a turn: strangers are not late while this thread is
_TELL_EVERY = 10.0  # seconds between two words about strangers
_IDLE = 60.0
_ENDING = 10.0

_HANDSHAKE = 22
"""The byte with which a TLS connection begins (RFC 8446, 5.1)."""
_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""The alert protocol_version, which tells a client without TLS that TLS is spoken here."""

_log = logger(__name__)


class TlsStoreServer:
    """Server at exactly one address.

    Args:
        family: of the address.
        target: numeric host, and port; 0: of the kernel's choice.
        credentials: of this process.

    Attributes:
        port: where it listens.
        thread: 0: the server has no descriptor table of its own.

    Raises:
        OSError: it cannot listen there.
    """

    thread = 0

    def __init__(self, family: int, target: tuple[str, int], *, credentials: Credentials) -> None:
        serving = _Serving(listening(family, target), credentials)
        self.port: int = serving.listener.getsockname()[1]
        worker = threading.Thread(target=serving.run, name="m8d-store-tls", daemon=True)
        self._finish = weakref.finalize(self, _end, serving, worker, os.getpid())
        self._finish.atexit = False
        _remember(serving)
        try:
            worker.start()
        except RuntimeError as error:  # the host has no thread left
            self._finish.detach()
            serving.abandon()
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Stop the server and free the port, within 10 s; so does losing the last reference. Idempotent."""
        self._finish()


def _end(serving: _Serving, worker: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has only a copy
        return
    serving.ending = True
    serving.wake()
    if worker is not threading.current_thread():
        worker.join(_ENDING)


class _Connection:
    """One connection; a stranger's until the handshake is over.

    Attributes:
        until: by the server's clock, for a stranger.
        parting: it is refused: what it still sends is discarded.
    """

    def __init__(self, sock: socket.socket, session: Session, dialogue: Dialogue, until: float) -> None:
        self.socket = sock
        self.session = session
        self.dialogue = dialogue
        self.until = until
        self.unsent = bytearray()
        self.events = 0
        self.heard = False
        self.parting = False


class _Serving:
    """The server, in its thread; `wake` is for any.

    Args:
        listener: belongs to this.
        credentials: of this process.
    """

    def __init__(self, listener: socket.socket, credentials: Credentials) -> None:
        self.listener = listener
        self.ending = False
        self._credentials = credentials
        self._values: dict[bytes, bytes] = {}
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[int, _Connection] = {}  # the oldest first
        self._clock, self._turned = 0.0, time.monotonic()
        self._resume_at: float | None = None
        self._tell_at = 0.0
        self._port = listener.getsockname()[1]
        self._most = unauthenticated_at_most(_STRANGERS)
        listener.setblocking(False)
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the thread's wait."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: it has ended
            self._rope.send(b"!")

    def run(self) -> None:
        """Thread entry point."""
        try:
            while not self.ending:
                self._turn()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close all descriptors: at the end, or in a forked child, whose parent's connections go on.

        No `unregister`: the parent's selector would lose them too.
        """
        self._selector.close()
        for each in (self.listener, self._bell, self._rope):
            each.close()
        for connection in tuple(self._connections.values()):
            connection.socket.close()
        self._connections.clear()
        self._strangers.clear()

    # -- a turn

    def _turn(self) -> None:
        wait = self._wait()
        events = self._selector.select(wait)
        now = time.monotonic()
        self._clock += min(now - self._turned, wait + _STALL)
        self._turned = now
        for key, mask in events:
            if isinstance(key.data, _Connection):
                self._serve(key.data, mask)
            elif key.fileobj is self.listener:
                self._accept()
            else:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
        for stranger in tuple(self._strangers.values()):
            if stranger.until > self._clock:
                break
            self._drop(stranger)
        if self._resume_at is not None and self._resume_at <= now:
            self._resume_at = None
            self._selector.register(self.listener, selectors.EVENT_READ)

    def _wait(self) -> float:
        ends = [_IDLE]
        for stranger in self._strangers.values():
            ends.append(stranger.until - self._clock)
            break
        if self._resume_at is not None:
            ends.append(self._resume_at - time.monotonic())
        return max(0.0, min(ends))

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            # First: it may read files, and a child that is forked meanwhile closes what is in the table only.
            session = Session(self._credentials, server=True)
            try:
                sock, _ = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._without_descriptors(error)
                return
            connection = _Connection(sock, session, Dialogue(self._values), self._clock + _PATIENCE)
            self._connections[sock.fileno()] = self._strangers[sock.fileno()] = connection
            sock.setblocking(False)
            if len(self._strangers) > self._most:
                self._drop(next(iter(self._strangers.values())))
            with contextlib.suppress(OSError):  # it is gone already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._watch(connection)

    def _without_descriptors(self, error: OSError) -> None:
        """Make room by a stranger, or stop accepting for a moment: the listener stays readable."""
        if self._strangers:
            self._drop(next(iter(self._strangers.values())))
            return
        _log.warning("the store at port %d accepts no connection: %s", self._port, error)
        self._selector.unregister(self.listener)
        self._resume_at = time.monotonic() + _PAUSE

    # -- a connection

    def _serve(self, connection: _Connection, mask: int) -> None:
        if self._connections.get(connection.socket.fileno()) is not connection:
            return
        try:
            if mask & selectors.EVENT_READ:
                self._read(connection)
            self._go_on(connection)
        except (OSError, ValueError) as error:  # its end, its bytes, its certificate
            self._refuse(connection, error)
        if self._connections.get(connection.socket.fileno()) is connection:
            self._watch(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            arrived = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        if not arrived:
            self._drop(connection)
            return
        if connection.parting:
            return
        if not connection.heard and arrived[0] != _HANDSHAKE:
            connection.unsent += _ALERT
            raise ConnectionError("it does not speak TLS")
        connection.heard = True
        connection.dialogue.take(connection.session.open(arrived))
        if connection.session.peer is not None:
            self._strangers.pop(connection.socket.fileno(), None)
        connection.unsent += connection.session.seal(b"")

    def _go_on(self, connection: _Connection) -> None:
        """Answer and send as far as the other end reads."""
        while connection.socket.fileno() >= 0:
            if len(connection.unsent) < _UNSENT and (replies := connection.dialogue.answers(_UNSENT)):
                connection.unsent += connection.session.seal(replies)
            if not connection.unsent:
                return
            try:
                sent = connection.socket.send(connection.unsent)
            except BlockingIOError:
                return
            del connection.unsent[:sent]

    def _refuse(self, connection: _Connection, error: Exception) -> None:
        """End a connection; a stranger is told why, and has the rest of its second to hear it."""
        number = connection.socket.fileno()
        if number not in self._strangers or connection.parting:
            if isinstance(error, ValueError):
                _log.warning("a connection to the store ends: %s: %s", connection.session.peer, error)
            self._drop(connection)
            return
        if (now := time.monotonic()) >= self._tell_at:
            self._tell_at = now + _TELL_EVERY
            _log.warning("the store at port %d refuses a connection: %s", self._port, error)
        connection.parting = True
        with contextlib.suppress(OSError):
            connection.unsent += connection.session.seal(b"")
            connection.socket.send(connection.unsent)
            connection.socket.shutdown(socket.SHUT_WR)
        connection.unsent.clear()

    def _watch(self, connection: _Connection) -> None:
        reads = len(connection.unsent) < _UNSENT
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if connection.unsent else 0)
        if events == connection.events:
            return
        if connection.events:
            self._selector.modify(connection.socket, events, connection)
        else:
            self._selector.register(connection.socket, events, connection)
        connection.events = events

    def _drop(self, connection: _Connection) -> None:
        number = connection.socket.fileno()
        if connection.events:
            self._selector.unregister(connection.socket)
        # Closed first: a child that is forked between the two finds it here, and closes its copy.
        connection.socket.close()
        self._strangers.pop(number, None)
        self._connections.pop(number, None)


_served: weakref.WeakSet[_Serving] = weakref.WeakSet()
_hooked = False


def _remember(serving: _Serving) -> None:
    global _hooked  # noqa: PLW0603  (once in each process)
    _served.add(serving)
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for each in tuple(_served):
        each.abandon()
    _served.clear()
