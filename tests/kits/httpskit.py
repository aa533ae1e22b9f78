"""Requests over TLS, with a certificate or without, and half-done handshakes."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kits.tlskit import Files

__all__ = ["Answer", "connected", "fetch", "hello", "seconds_until_dropped"]


class Answer(NamedTuple):
    """What came: the common name of the server's certificate, too."""

    status: int
    body: str
    headers: http.client.HTTPMessage
    server: str


def _context(ca: str, shown: Files | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    context.check_hostname = False
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


def connected(where: tuple[str, int], ca: str, shown: Files | None = None) -> ssl.SSLSocket:
    """Connect, and shake hands."""
    return _context(ca, shown).wrap_socket(socket.create_connection(where, timeout=30))


def fetch(
    where: tuple[str, int],
    path: str,
    *,
    ca: str,
    shown: Files | None = None,
    headers: dict[str, str] | None = None,
    method: str = "GET",
) -> Answer:
    """Ask once.

    Args:
        where: host and port.
        path: with what stands behind "?".
        ca: path of the authority that the server's certificate must be of.
        shown: the client's certificate.
        headers: of the request.
        method: of the request.

    Raises:
        OSError, http.client.HTTPException: the connection was refused.
    """
    link = http.client.HTTPSConnection(*where, timeout=30, context=_context(ca, shown))
    try:
        link.request(method, path, headers=headers or {})
        assert isinstance(link.sock, ssl.SSLSocket)
        assert link.sock.version() == "TLSv1.3"
        subject = dict(pair for each in (link.sock.getpeercert() or {})["subject"] for pair in each)
        answer = link.getresponse()
        return Answer(answer.status, answer.read().decode(), answer.headers, subject["commonName"])
    finally:
        link.close()


def hello() -> bytes:
    """Return a client's first message of a handshake."""
    arrived, written = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        context.wrap_bio(arrived, written).do_handshake()
    except ssl.SSLWantReadError:
        return written.read()
    raise AssertionError("a handshake without an answer")


def seconds_until_dropped(where: tuple[str, int], said: bytes, *, slowly: bool = False) -> float:
    """Say it, and wait for the end of the connection.

    Args:
        where: host and port.
        said: at once; "" says nothing.
        slowly: say a byte each 0.1 s instead, for as long as there are some.
    """
    with socket.create_connection(where, timeout=30) as stranger:
        began = time.monotonic()
        try:
            if slowly:
                stranger.settimeout(0.1)
                for each in said:
                    stranger.sendall(bytes([each]))
                    try:
                        if not stranger.recv(1 << 16):
                            return time.monotonic() - began
                    except TimeoutError:
                        continue
                stranger.settimeout(30)
            else:
                stranger.sendall(said)
            while stranger.recv(1 << 16):
                continue
        except ConnectionError:
            return time.monotonic() - began
        return time.monotonic() - began
