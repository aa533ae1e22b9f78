"""A small web server in a thread: ``/metrics``, ``/live``, ``/ready``."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import socket
import ssl
import threading
import time
import weakref
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from multiworld._net.listen_address import DEFAULT, host_and_port
from multiworld._net.tls.credentials import current
from multiworld._net.tls.session import RefusedError
from multiworld._net.tls.visitors import HANDSHAKE, SILENCE, is_peer
from multiworld.errors import MultiworldError
from multiworld.logs.source import logger
from multiworld.metrics import health
from multiworld.metrics.collector import client
from multiworld.metrics.recorder import recorder
from multiworld.metrics.text import exposition

if TYPE_CHECKING:
    from multiworld._net.tls.credentials import Credentials
    from multiworld.metrics.health import Health

__all__ = ["CLIENTS", "MetricsServer", "serve_metrics"]

CLIENTS = 16
"""Connections that are served at a time. A further one ends the oldest that has not asked, or is closed."""

_PATIENCE = 5.0  # seconds that a client may take to say what it wants
_ROOM = 1.0  # seconds at most in which one that was ended gives its place up
_PAUSE = 0.1  # seconds without accepting, when the process has no descriptor left
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_TEXT = "text/plain; charset=utf-8"
_NO_CERTIFICATE = b"/metrics needs a client certificate of this process's job; /live and /ready need none\n"

_log = logger(__name__)


class MetricsServer:
    """A server that runs until `close`, or the end of the program. Made by `multiworld.serve_metrics`.

    Attributes:
        host, port: where it listens.
        url: of its root, ``"http://127.0.0.1:9400/"``; https in secure mode.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.host, self.port = server.server_name, server.server_port
        name = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "http" if server.credentials is None else "https"
        self.url = f"{scheme}://{name}:{self.port}/"
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.5}, name="m8d-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._thread.join(_PATIENCE)

    def __enter__(self) -> MetricsServer:  # noqa: PYI034  (typing.Self is not in Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(address: str = DEFAULT) -> MetricsServer:
    """Serve this process's numbers at ``/metrics``, and answers to probes at ``/live`` and ``/ready``.

    Call it before the first join: events count from here on. Who reaches the address reads names of worlds,
    causes and counts, without a password. In secure mode (``M8D_TLS_CERT``) it is HTTPS, and ``/metrics``
    needs a client certificate of the job.

    Args:
        address: ``"HOST:PORT"``, ``"[::]:9400"`` for IPv6; port 0: any that is free.

    Raises:
        MultiworldError: prometheus_client is not installed, the address is none, or is in use, or a file of
            ``M8D_TLS_*`` cannot be used.
    """
    client()
    credentials = current()
    host, port = host_and_port(address)
    try:
        server = _Server(host, port, credentials)
    except (OSError, UnicodeError) as error:  # a name of too long parts is no text for the resolver
        raise MultiworldError(
            f"address={address!r}: {error}",
            rule="It is HOST:PORT of this host, where no other process listens",
            next_step="Take 127.0.0.1:0 for any free port; MetricsServer.url has it",
        ) from error
    recorder.begin()
    return MetricsServer(server)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, credentials: Credentials | None) -> None:
        self.credentials = credentials
        self._free = threading.BoundedSemaphore(CLIENTS)
        self._ending = threading.Event()
        self._unheard: dict[Any, None] = {}  # whose requests are not here as a whole; the oldest first
        self._lock = threading.Lock()  # of these
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        _listening.add(self)
        _know_forks()

    def server_bind(self) -> None:
        """Bind, without the look-up of the host's name that http.server makes."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> Any:
        """Accept a connection; without free descriptors pause, because the listener stays readable.

        Raises:
            OSError: there is none, or no room for it; the loop that calls this goes on.
        """
        try:
            request, address = super().get_request()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._ending.wait(_PAUSE)
            raise
        if self.credentials is not None:
            context = self.credentials.context_for_visitors()
            request = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def shutdown(self) -> None:
        """End the loop, and its pause."""
        self._ending.set()
        super().shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless too many are being answered; who has asked for nothing makes room."""
        if not self._free.acquire(blocking=False) and not (
            self._end_oldest() and self._free.acquire(timeout=_ROOM)
        ):
            self.shutdown_request(request)
            return
        with self._lock:
            self._unheard[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def _end_oldest(self) -> bool:
        with self._lock:
            oldest = next(iter(self._unheard), None)
            if oldest is None:
                return False
            del self._unheard[oldest]
            with contextlib.suppress(OSError):  # the client was first
                # Not an SSLSocket's own method: that takes the session away, which another thread uses.
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        return True

    def heard(self, request: Any) -> None:
        """Note that a request is here as a whole, or its connection is over: it makes no room for others."""
        with self._lock:
            self._unheard.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, in secure mode after the handshake."""
        try:
            if self.credentials is not None:
                _shake_hands(request, self.credentials)
            super().process_request_thread(request, client_address)
        except OSError:  # of the handshake
            self.handle_error(request, client_address)
            self.shutdown_request(request)
        finally:
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.heard(request)  # first: its descriptor may be another's at once
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  (the signature of socketserver)
        """Log what a client's connection ended with: it may close it whenever it likes."""
        _log.debug("a client at %s", client_address, exc_info=True)


class _Request(io.RawIOBase):
    """What a client says, read until a time: one that says a byte now and then keeps its place no longer."""

    def __init__(self, connection: socket.socket, until: float, silence: float) -> None:
        self._connection, self._until, self._silence = connection, until, silence

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(min(self._silence, max(0.001, self._until - time.monotonic())))
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE
    server_version, sys_version = "multiworld", ""

    def setup(self) -> None:
        super().setup()
        silence = self.timeout if self._trusted else SILENCE
        self.rfile = io.BufferedReader(_Request(self.connection, time.monotonic() + self.timeout, silence))

    def parse_request(self) -> bool:
        """Parse what was read; the answer has a time of its own."""
        parsed = super().parse_request()
        self.server.heard(self.connection)
        self.connection.settimeout(self.timeout)
        return parsed

    @property
    def _trusted(self) -> bool:
        """Whether the client may read names: in secure mode it needs a certificate for that."""
        return not isinstance(self.connection, ssl.SSLSocket) or bool(self.connection.getpeercert())

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/metrics" and not self._trusted:
            self._answer(HTTPStatus.FORBIDDEN, _NO_CERTIFICATE, _TEXT)
        elif url.path == "/metrics":
            self._answer(*_numbers(self.headers.get("Accept")))
        elif url.path == "/live":
            self._tell(health.live())
        elif url.path == "/ready":
            self._tell(health.ready(parse_qs(url.query, keep_blank_values=True).get("world", [])))
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"see /metrics, /live and /ready\n", _TEXT)

    do_HEAD = do_GET  # noqa: N815  (http.server's name)

    def _tell(self, found: Health) -> None:
        status = HTTPStatus.OK if found.ok else HTTPStatus.SERVICE_UNAVAILABLE
        text = found.text if self._trusted else ("ok" if found.ok else "no")
        self._answer(status, f"{text}\n".encode(), _TEXT)

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (http.server's name)
        _log.debug(format, *args)


def _shake_hands(connection: ssl.SSLSocket, credentials: Credentials) -> None:
    """Shake hands with a client.

    Raises:
        OSError: it does not speak TLS, takes too long, or has a certificate of others.
    """
    connection.settimeout(HANDSHAKE)  # for the handshake as a whole
    connection.do_handshake()
    try:
        is_peer(connection, credentials.identity)
    except RefusedError as error:
        _log.warning("a client of the numbers is refused: %s", error)
        raise


def _numbers(accept: str | None) -> tuple[HTTPStatus, bytes, str]:
    try:
        return HTTPStatus.OK, *exposition(accept)
    except Exception:  # noqa: BLE001  (logged: a scrape fails, and the program goes on)
        _log.exception("the numbers could not be collected")
        return HTTPStatus.INTERNAL_SERVER_ERROR, b"see the program's log\n", _TEXT


_listening: weakref.WeakSet[_Server] = weakref.WeakSet()


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Close a child's copies: it has no thread that answers, and would keep the address."""
    for server in list(_listening):
        server.socket.close()
