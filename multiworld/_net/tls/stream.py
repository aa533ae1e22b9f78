"""A TLS connection that reads and writes like a non-blocking socket, straight from and into its buffers."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
from typing import TYPE_CHECKING, Any, TypeAlias

from multiworld._core.reraise import as_new, raised_by_the_program
from multiworld._net.tls.session import peer_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import ReadableBuffer, WriteableBuffer

    from multiworld._net.tls.credentials import Credentials
    from multiworld._net.tls.identity import Identity

__all__ = ["Stream", "TlsStream"]

_RECORD = 16384
"""Bytes that a TLS record holds (RFC 8446, 5.1)."""

_TURN = 1 << 20
"""Bytes read in one call."""


class TlsStream:
    """See the module.

    A record that was written in part is over only when the socket takes its rest, of which the caller must
    hear: the last byte of the record counts as not written until then. A stream goes on with that byte
    anyway.

    Args:
        connection: non-blocking, connected or connecting; it belongs to this.
        credentials: of this process.
        server: whether this end accepted it.

    Attributes:
        peer: who the other end is; None until `shake_hands` is over.
        events: what `shake_hands` waits for, for `select.poll`.
    """

    def __init__(self, connection: socket.socket, credentials: Credentials, *, server: bool) -> None:
        self.peer: Identity | None = None
        self.events = select.POLLIN if server else select.POLLOUT
        self._credentials = credentials
        self._server = server
        self._socket: Any = connection  # until it is connected; then the `SSLSocket`
        self._descriptor = connection.fileno()
        self._late: OSError | None = None  # the next read raises it
        self._owed = 0  # length of the record that was not written whole

    def shake_hands(self) -> None:
        """Go on with the handshake.

        Raises:
            BlockingIOError: it is to go on at `events`.
            OSError: it has failed.
        """
        if not isinstance(self._socket, ssl.SSLSocket):
            self._connected()
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self.events = select.POLLIN
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            self.events = select.POLLOUT
            raise BlockingIOError from None
        self.peer = peer_of(self._socket, self._credentials.identity)

    def _connected(self) -> None:
        if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        try:
            self._socket.getpeername()
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            raise BlockingIOError from None
        context = self._credentials.context(server=self._server)
        # It takes the descriptor over.
        self._socket = context.wrap_socket(
            self._socket, server_side=self._server, do_handshake_on_connect=False
        )

    def send(self, data: ReadableBuffer, _flags: int = 0) -> int:
        """Write as many bytes as the socket takes; flags mean nothing here.

        Raises:
            BlockingIOError: it takes none.
            OSError: the connection has ended.
        """
        view = memoryview(data).cast("B")
        done = 0
        if self._owed:
            self._write_rest(view)
            done = 1
        while done < len(view):
            piece = view[done : done + _RECORD]
            try:
                self._socket.send(piece)
            except ssl.SSLWantWriteError:
                self._owed = len(piece)
                done += len(piece) - 1
                break
            done += len(piece)
        if not done:
            raise BlockingIOError
        return done

    def sendmsg(self, buffers: Iterable[ReadableBuffer], _ancillary: object = (), _flags: int = 0) -> int:
        """Write buffers one after the other, as `send`; short ones together in one record."""
        done, joined = 0, bytearray()
        for each in buffers:
            view = memoryview(each).cast("B")
            start = min(len(view), _RECORD - len(joined))
            joined += view[:start]
            if len(joined) < _RECORD:
                continue
            done, whole = self._add(done, joined)
            if whole and start < len(view):
                done, whole = self._add(done, view[start:])
            if not whole:
                return done
            joined = bytearray()
        return self._add(done, joined)[0] if joined else done

    def _add(self, done: int, data: ReadableBuffer) -> tuple[int, bool]:
        """Write one more piece; return the sum, and whether it was written whole."""
        size = len(memoryview(data))
        try:
            count = self.send(data)
        except BlockingIOError:
            if not done:
                raise
            return done, False
        return done + count, count == size

    def _write_rest(self, view: memoryview) -> None:
        if not len(view):
            raise BlockingIOError
        try:
            # Of the bytes only the number counts: they are sealed.
            self._socket.send(bytes(self._owed))
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        self._owed = 0

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, _flags: int = 0) -> int:
        """Read what has come, `_TURN` at most; 0 at the end. Flags mean nothing here.

        Fewer bytes than the buffer holds: records are read whole, and nothing of them waits here, where
        `select.poll` would not see it.

        Raises:
            BlockingIOError: no record is there whole.
            OSError: the connection has ended.
        """
        if self._late is not None:
            raise as_new(self._late)
        try:
            done: int = self._socket.recv_into(buffer, nbytes)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None
        if done == _RECORD:  # of a long message, of which more has probably come
            done = self._read_on(memoryview(buffer).cast("B")[: nbytes or None], done)
        return done

    def _read_on(self, view: memoryview, done: int) -> int:
        """Read further records into what is left of a buffer; return the sum."""
        most = min(len(view), _TURN)
        try:
            while done < most and (count := self._socket.recv_into(view[done:])):
                done += count
        except ssl.SSLWantReadError:
            return done  # that was all
        except OSError as error:
            if raised_by_the_program(error):
                raise
            self._late = as_new(error)  # what came before it is read first
        return done

    @property
    def pending(self) -> int:
        """Bytes of a record that have been read from the socket, and not by `recv_into`; 1 for an error."""
        return 1 if self._late is not None else int(self._socket.pending())

    @property
    def family(self) -> socket.AddressFamily:
        """Of the socket."""
        family: socket.AddressFamily = self._socket.family
        return family

    def fileno(self) -> int:
        """Return the descriptor; -1 once it is closed."""
        return self._descriptor

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """As the socket's."""
        self._socket.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        """As the socket's; what comes is still read as TLS, unlike with `ssl.SSLSocket.shutdown`."""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """As the socket's; no goodbye of TLS's is written. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()
        self._descriptor = -1


Stream: TypeAlias = socket.socket | TlsStream
"""A connection; both kinds read and write alike."""
