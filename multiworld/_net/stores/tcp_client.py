"""TCPStore client whose calls keep deadlines.

torch's own client waits in C++ without a limit while the server is silent, with one mutex for all callers,
and prints warnings when the server dies. This client speaks the same protocol with timeouts. Query numbers
are those of ``TCPStoreBackend.hpp``, the same in torch 2.4 to 2.15 (later ones are appended).

In secure mode the same bytes go over mutual TLS 1.3, to a server of this package (`tls_server.py`).
"""

from __future__ import annotations

import collections
import math
import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING

from multiworld._net.tls.credentials import current
from multiworld._net.tls.session import HUNG_UP, RefusedError, peer_of

if TYPE_CHECKING:
    from multiworld._net.tls.credentials import Credentials

__all__ = ["NotAStoreError", "TcpClient"]

_VALIDATE, _SET, _COMPARE_SET, _ADD, _CHECK, _COUNT, _DELETE, _APPEND = 0, 1, 2, 4, 5, 7, 8, 9
_MAGIC = 0x3C85F7CE  # TCPStoreBackend.hpp, validationMagicNumber
_BITS = 0  # a reply of 8 bytes of length, then that many bytes; every other reply has a fixed size
_ORDER = sys.byteorder  # torch sends numbers as they lie in memory
_ALERT = b"\x15\x03"  # so begins an alert of TLS (RFC 8446, 5.1)
_LONGEST = 3600.0  # seconds of one `poll`, which takes 24 days at most
_MOST = 1 << 30  # longer than any value: the other end does not speak the protocol


class NotAStoreError(ConnectionError):
    """Something answers at the address, and it is not a TCPStore.

    Args:
        why: what was seen.
        next_step: for the user, where the settings are the cause; "" otherwise.
    """

    def __init__(self, why: str, next_step: str = "") -> None:
        super().__init__(why)
        self.next_step = next_step


class TcpClient:
    """Calls of one process to one TCPStore server; thread-safe.

    Every call takes a deadline (``time.monotonic()`` seconds) and raises TimeoutError when it passes. A late
    answer is discarded by the next call. Any other error (ConnectionError) ends the connection for good: the
    server's data may be gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.RLock()  # it knows its owner; no call begins in another one
        self._owed: collections.deque[int] = (
            collections.deque()
        )  # sizes of the replies that are still to come
        self._buffer = bytearray()
        self._error: str | None = None
        # Whether an exception of a signal's handler (Ctrl-C) would have the next call get this one's reply.
        self._torn = False
        # Compared with, never stored: a compare_set with it reads a key that may be missing, in one round
        # trip.
        self._nothing = b"m8d-nothing-" + os.urandom(16)
        self.local = sock.getsockname()
        self.remote = sock.getpeername()

    @classmethod
    def connect(cls, family: int, address: tuple[str, int], *, deadline: float) -> TcpClient:
        """Connect to `address` and see that a TCPStore answers; over TLS where the settings say so.

        Raises:
            NotAStoreError: something else answers, or nothing that was accepted.
            OSError: no connection.
            MultiworldError: of `multiworld._net.tls.credentials.current`.
        """
        return cls.connect_as(current(), family, address, deadline=deadline)

    @classmethod
    def connect_as(
        cls, credentials: Credentials | None, family: int, address: tuple[str, int], *, deadline: float
    ) -> TcpClient:
        """Connect as `connect`: over TLS with `credentials`, without where they are None."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = None
            try:
                if credentials is not None:
                    sock = _tls(sock, credentials, deadline)
                client = cls(sock)
                # The server drops connections without it.
                client._call(struct.pack("=BI", _VALIDATE, _MAGIC), None, deadline)
                client.ping(deadline=deadline)
            except OSError as error:
                raise _no_store(error, client, credentials) from error
        except BaseException:
            sock.close()
            raise
        return client

    def alive(self, *, deadline: float) -> bool:
        """Whether the server still answers on this connection."""
        try:
            self.ping(deadline=deadline)
        except OSError:
            return False
        return True

    def ping(self, *, deadline: float) -> None:
        """Ask for a sign of life."""
        # A key that does not exist: the answer repeats 28 bytes of the query. (torch 2.4 has no PING.)
        if self.get("m8d/ping", deadline=deadline) is not None:
            raise self._end("it sends more than was asked for")

    def set(self, key: str, value: bytes, *, deadline: float) -> None:
        """Store `value` at `key`; the server does not answer to it."""
        self._call(struct.pack("=B", _SET) + _key(key) + _bits(value), None, deadline)

    def append(self, key: str, value: bytes, *, deadline: float) -> None:
        """Add `value` to the end of what is at `key`; the server does not answer to it."""
        self._call(struct.pack("=B", _APPEND) + _key(key) + _bits(value), None, deadline)

    def get(self, key: str, *, deadline: float) -> bytes | None:
        """Return the value at `key`; None where there is none."""
        value = self.compare_set(key, self._nothing, self._nothing, deadline=deadline)
        return None if value == self._nothing else value

    def compare_set(self, key: str, expected: bytes, desired: bytes, *, deadline: float) -> bytes:
        """Store `desired` if the value is `expected` (or missing, if that is empty); return the value then.

        A missing key with an `expected` that is not empty is left alone, and `expected` is returned
        (TCPStore's rule).
        """
        return self._call(
            struct.pack("=B", _COMPARE_SET) + _key(key) + _bits(expected) + _bits(desired), _BITS, deadline
        )

    def add(self, key: str, amount: int, *, deadline: float) -> int:
        """Add to the number at `key` (0 where there is none); return the sum."""
        reply = self._call(struct.pack("=B", _ADD) + _key(key) + struct.pack("=q", amount), 8, deadline)
        return int.from_bytes(reply, _ORDER, signed=True)

    def check(self, keys: list[str], *, deadline: float) -> bool:
        """Whether every key has a value."""
        payload = struct.pack("=BQ", _CHECK, len(keys)) + b"".join(map(_key, keys))
        return self._call(payload, 1, deadline) == b"\0"

    def count(self, *, deadline: float) -> int:
        """Return the number of keys on the server, of all clients."""
        return int.from_bytes(self._call(struct.pack("=B", _COUNT), 8, deadline), _ORDER, signed=True)

    def delete(self, key: str, *, deadline: float) -> bool:
        """Remove `key`; return whether it existed."""
        reply = self._call(struct.pack("=B", _DELETE) + _key(key), 8, deadline)
        return int.from_bytes(reply, _ORDER, signed=True) == 1

    def close(self) -> None:
        """End the connection; a call under way in another thread raises ConnectionError."""
        self._error = self._error or "it was closed here"
        try:
            # Wakes a thread that reads. (SSLSocket's own would have it go on without TLS.)
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:  # not connected any more
            self._error = self._error or "it is closed"
        with self._lock:
            self._sock.close()

    def _call(self, payload: bytes, size: int | None, deadline: float) -> bytes:
        """Send a query; return its reply (nothing for a `size` of None)."""
        if self._held_here():
            raise TimeoutError("a signal's handler asks the store in the middle of a call of the same thread")
        try:
            try:
                if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("the store's server does not answer")
                if self._torn:
                    self._error = self._error or "a call was interrupted"
                if self._error is not None:
                    raise ConnectionError(f"the connection to the store is over: {self._error}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the store's server does not answer")
                self._torn = True
                self._send(payload, left)
                if size is not None:
                    self._owed.append(size)
                self._torn = False
                return b"" if size is None else self._receive(deadline)
            finally:
                self._leave()
        finally:  # an exception of a signal's handler may have come in the first one
            self._leave()

    def _held_here(self) -> bool:
        # Python's own `Condition` asks so, too.
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001  (Python's own `Condition` asks so, too)

    def _leave(self) -> None:
        if self._held_here():
            self._lock.release()

    def _send(self, payload: bytes, left: float) -> None:
        try:
            self._sock.settimeout(left)
            self._sock.sendall(payload)
        except OSError as error:  # after a query that was partly sent the connection is unusable
            raise self._end(str(error)) from error

    def _receive(self, deadline: float) -> bytes:
        while True:
            self._torn = True
            while (reply := self._parse()) is not None:
                self._owed.popleft()
                if not self._owed:
                    self._torn = False
                    return reply
            self._torn = False
            self._wait(deadline)
            self._torn = True
            try:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = self._sock.recv(65536)
            except TimeoutError as error:  # a record of TLS that has come in part
                self._torn = False
                raise TimeoutError("the store's server does not answer") from error
            except OSError as error:
                raise self._end(str(error)) from error
            if not chunk:
                raise self._end("its server closed it")
            self._buffer += chunk

    def _wait(self, deadline: float) -> None:
        """Wait until there is something to read; an exception of a signal's handler loses nothing here."""
        if self._sock.fileno() < 0:  # by a signal's handler, in the middle of this call
            raise self._end("it was closed here")
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(math.ceil(min(left, _LONGEST) * 1000)):
                return
        raise TimeoutError("the store's server does not answer")

    def _parse(self) -> bytes | None:
        """Take the next reply out of the buffer, if it is complete."""
        start, size = 0, self._owed[0]
        if size == _BITS:
            if len(self._buffer) < 8:
                return None
            start, size = 8, int.from_bytes(self._buffer[:8], _ORDER)
            if size > _MOST:
                raise self._end("it does not speak TCPStore's protocol")
        if len(self._buffer) < start + size:
            return None
        reply = bytes(self._buffer[start : start + size])
        del self._buffer[: start + size]
        return reply

    def _end(self, why: str) -> ConnectionError:
        self._error = self._error or why
        return ConnectionError(f"the connection to the store is over: {self._error}")


def _bits(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def _key(key: str) -> bytes:
    return _bits(b"/" + key.encode())  # TCPStore.hpp, keyPrefix_: torch's own clients see the same keys


def _tls(sock: socket.socket, credentials: Credentials, deadline: float) -> ssl.SSLSocket:
    """Return the connection as TLS, its handshake over; it takes the descriptor of `sock` over."""
    context = credentials.context(server=False)
    wrapped = context.wrap_socket(sock, do_handshake_on_connect=False)
    try:
        wrapped.settimeout(max(0.001, deadline - time.monotonic()))
        wrapped.do_handshake()
        peer_of(wrapped, credentials.identity)
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _no_store(error: OSError, client: TcpClient | None, credentials: Credentials | None) -> NotAStoreError:
    """Return why what listens there is no store for this process."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if credentials is None:
        if client is not None and client._buffer.startswith(_ALERT):  # noqa: SLF001  (of this module)
            return NotAStoreError(
                "the store there speaks TLS, and this process is not in secure mode",
                "Set M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA for this process; see docs/security.md",
            )
        return NotAStoreError(f"what listens there does not answer as a TCPStore ({error})")
    if client is None and isinstance(cause, TimeoutError):  # torch's server says nothing to TLS
        return NotAStoreError(
            "what listens there does not answer over TLS: it stands still, or does not speak TLS, and this "
            "process is in secure mode",
            "See that the process that serves the store runs, with M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA",
        )
    if client is None and isinstance(cause, HUNG_UP):
        return NotAStoreError(
            "what listens there closed the connection in the TLS handshake: no store is behind it, or it "
            "does not speak TLS, and this process is in secure mode",
            "See that the process that serves the store runs, with M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA",
        )
    if isinstance(cause, ssl.SSLCertVerificationError):
        return NotAStoreError(
            f"the certificate of the store there is refused ({cause.verify_message})",
            "Start the process that serves it with a certificate by an authority in this one's M8D_TLS_CA",
        )
    if isinstance(cause, RefusedError):
        return NotAStoreError(
            f"the store there is refused: {cause}", "Give the address of a store of this process's own job"
        )
    if client is not None and isinstance(cause, ssl.SSLError) and not isinstance(cause, HUNG_UP):
        return NotAStoreError(
            f"the store there refuses this process's certificate, {credentials.identity} ({cause.reason})",
            "Give this process a valid certificate (M8D_TLS_CERT) by an authority in that one's M8D_TLS_CA",
        )
    if client is not None:
        return NotAStoreError(f"what listens there does not answer as a TCPStore over TLS ({error})")
    return NotAStoreError(
        f"what listens there does not speak TLS, and this process is in secure mode ({cause})",
        "Start the process that serves the store with M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA, too",
    )
