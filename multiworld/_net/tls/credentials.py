"""This process's certificate, key and authority, read from the files that the settings name.

A file that changes is read again for the connections that are made after it: keys can be replaced while
worlds work. Whether certificate, key and authority belong together is found by a handshake of the process
with itself, in memory, which also tells its own identity.
"""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
import threading
import time
import weakref
from typing import Any, NamedTuple

from multiworld import settings
from multiworld._net.tls.identity import Identity
from multiworld.errors import MultiworldError
from multiworld.logs.source import logger

__all__ = ["LOOK_EVERY", "Credentials", "current", "versions_of"]

LOOK_EVERY = 1.0
"""Seconds between two looks at the files."""

_log = logger(__name__)


class _Loaded(NamedTuple):
    versions: tuple[tuple[int, int, int], ...]
    client: ssl.SSLContext
    server: ssl.SSLContext
    visited: ssl.SSLContext
    identity: Identity
    until: float


class Credentials:
    """Contexts for connections, of one certificate; thread-safe.

    Args:
        cert: path of the certificate, PEM, with the chain up to the authority.
        key: path of its private key, PEM, without a password.
        ca: path of the authorities' certificates, PEM: the other end's must be signed by one of them.

    Raises:
        MultiworldError: a file cannot be read, or they do not belong together.
    """

    def __init__(self, cert: str, key: str, ca: str) -> None:
        self._paths = cert, key, ca
        self._lock = threading.Lock()
        self._loaded = self._load()
        self._look_at = time.monotonic() + LOOK_EVERY
        _read.add(self)
        _know_forks()

    @property
    def identity(self) -> Identity:
        """This process's own."""
        return self._current().identity

    @property
    def until(self) -> float:
        """``time.time()`` seconds until which the certificate is valid."""
        return self._current().until

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the context for a new connection: of the end that accepts it, or of the one that dials."""
        loaded = self._current()
        return loaded.server if server else loaded.client

    def context_for_visitors(self) -> ssl.SSLContext:
        """Return the context to accept a new connection whose other end may have no certificate.

        One that it shows is checked as ever. Who may do what without one is for the protocol inside to say.
        """
        return self._current().visited

    def _current(self) -> _Loaded:
        # No thread waits for the one that reads: until it has, what was good is used on.
        if time.monotonic() >= self._look_at and self._lock.acquire(blocking=False):
            try:
                self._look_at = time.monotonic() + LOOK_EVERY
                self._read_again()
            finally:
                self._lock.release()
        return self._loaded

    def _read_again(self) -> None:
        try:
            if versions_of(self._paths) == self._loaded.versions:
                return
            self._loaded = self._load()
        except (OSError, MultiworldError) as error:
            # They are being replaced, one after the other, or wrongly: what was good is used on.
            _log.warning("new TLS files are not used: %s", error)
        else:
            _log.info("new TLS files are used: %s", self._loaded.identity)

    def _load(self) -> _Loaded:
        cert, key, ca = self._paths
        try:
            versions = versions_of(self._paths)
            contexts = []
            for protocol, verify in (
                (ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED),
                (ssl.PROTOCOL_TLS_SERVER, ssl.CERT_REQUIRED),
                (ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL),
            ):
                context = ssl.SSLContext(protocol)
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                # A process that dies, or closes its socket, says nothing of TLS's first; the protocols inside
                # know where a message ends.
                context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
                context.check_hostname = False  # the authority and the job decide, not a name of a host
                context.verify_mode = verify
                context.load_cert_chain(cert, key, _no_password)
                context.load_verify_locations(ca)
                if protocol is ssl.PROTOCOL_TLS_SERVER:
                    context.num_tickets = 0  # no session is resumed
                contexts.append(context)
            client, server, visited = contexts
            certificate = _met_itself(client, server)
            until = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
            return _Loaded(versions, client, server, visited, Identity.of(certificate), until)
        except OSError as error:  # an SSLError is one
            raise MultiworldError(
                f"M8D_TLS_CERT={cert!r}, M8D_TLS_KEY={key!r}, M8D_TLS_CA={ca!r}: {error}",
                rule="They are PEM files: a certificate for clients and servers, its key without a password, "
                "and the authority that signed it",
                next_step="`openssl verify -CAfile CA CERT` looks at them; see docs/security.md",
            ) from error


def current() -> Credentials | None:
    """Return this process's credentials by the settings; None where it is not in secure mode.

    Raises:
        MultiworldError: of `settings.load` and `Credentials`.
    """
    chosen = settings.load()
    if not chosen.tls_cert:
        return None
    return _credentials(chosen.tls_cert, chosen.tls_key, chosen.tls_ca)


@functools.lru_cache(maxsize=8)
def _credentials(cert: str, key: str, ca: str) -> Credentials:
    return Credentials(cert, key, ca)


_read: weakref.WeakSet[Credentials] = weakref.WeakSet()


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for each in tuple(_read):
        each._lock = threading.Lock()  # noqa: SLF001  (of this module; a thread of the parent may have held it)


def versions_of(paths: tuple[str, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return what differs once one of the files is another one, or has other content.

    Raises:
        OSError: there is no such file, or it cannot be reached.
    """
    found = [os.stat(each) for each in paths]  # noqa: PTH116  (three a second)
    return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)


def _no_password() -> str:
    raise ssl.SSLError("the key has a password")


def _met_itself(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    """Carry a handshake of both contexts out, in memory; return the certificate that the server was shown."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    dials = client.wrap_bio(back, there)
    accepts = server.wrap_bio(there, back, server_side=True)
    waiting = [dials, accepts, dials, accepts]  # whose turn it is: a TLS 1.3 handshake has no more
    for end in waiting:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return accepts.getpeercert() or {}
