"""One end of a TLS connection as bytes in, bytes out: no socket, and nothing waits."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from multiworld._net.tls.identity import Identity

if TYPE_CHECKING:
    from multiworld._net.tls.credentials import Credentials

__all__ = ["HUNG_UP", "RefusedError", "Session", "peer_of"]

HUNG_UP = ssl.SSLZeroReturnError, ssl.SSLEOFError, ssl.SSLSyscallError
"""Errors of a connection that the other end closed: they say nothing about its certificate, or this one's."""

_CHUNK = 65536


class RefusedError(ConnectionError):
    """The other end has a certificate of the authority, and may not speak with this process all the same."""


class Session:
    """See the module.

    Args:
        credentials: of this process.
        server: whether this end accepted the connection.

    Attributes:
        peer: who the other end is; None until the handshake is over.
    """

    def __init__(self, credentials: Credentials, *, server: bool) -> None:
        self.peer: Identity | None = None
        self._own = credentials.identity
        self._arrived, self._written = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = credentials.context(server=server).wrap_bio(
            self._arrived, self._written, server_side=server
        )
        self._early = bytearray()  # to be sealed when the handshake is over
        self._shake_hands()

    def seal(self, plain: bytes) -> bytes:
        """Return what is to be written for `plain`, with all that waits; "" before the handshake is over.

        Raises:
            OSError: there is something to seal, and the connection is over: `open` has raised why.
        """
        if self.peer is None:
            self._early += plain
        elif plain:
            self._tls.write(plain)
        return self._written.read()

    def open(self, arrived: bytes) -> bytes:
        """Return the plain bytes that have come whole with `arrived`; `seal` what it asks for afterwards.

        Raises:
            OSError: the other end has no certificate of the authority, is none of this job, or does not speak
                TLS; what `seal` returns may tell it so.
        """
        self._arrived.write(arrived)
        if self.peer is None:
            self._shake_hands()
        plain = bytearray()
        try:
            while self.peer is not None and (chunk := self._tls.read(_CHUNK)):
                plain += chunk
        except (
            ssl.SSLWantReadError,
            ssl.SSLZeroReturnError,
        ):  # that was all
            return bytes(plain)
        return bytes(plain)

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self.peer = peer_of(self._tls, self._own)
        if self._early:
            self._tls.write(self._early)
            self._early.clear()


def peer_of(tls: ssl.SSLObject | ssl.SSLSocket, own: Identity) -> Identity:
    """Return who is at the other end of a connection whose handshake is over.

    Raises:
        RefusedError: no process of the own job.
    """
    peer = Identity.of(tls.getpeercert() or {})
    if (why := own.refusal(peer)) is not None:
        raise RefusedError(why)
    return peer
