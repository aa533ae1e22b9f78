"""Serving the page: a socket, a thread with its own event loop, and what ends both."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from multiworld import settings
from multiworld._net.listen_address import DEFAULT, host_and_port, is_loopback
from multiworld._net.tls.credentials import current
from multiworld.errors import MultiworldError
from multiworld.logs.source import logger
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from multiworld.web.sources import Source

__all__ = ["EXPOSED", "Page", "serve", "serve_page"]

EXPOSED = (
    "%s is not encrypted, and other hosts may reach it: who lies between reads the token. Set M8D_TLS_CERT, "
    "M8D_TLS_KEY and M8D_TLS_CA, or serve it at 127.0.0.1 and use a tunnel"
)
_STARTING = 15.0
_ENDING = 5.0
_LOOK = 0.005

_log = logger(__name__)


class Page:
    """A page that is served. `close`, or the end of the program, ends it; it is a context manager, too.

    A forked child does not serve it: its copy is closed there.

    Attributes:
        url: its address, without the token.
        token: that it asks for.
        host, port: where it listens.
        ca: in secure mode, path of the authority's certificate, which a browser needs to trust the page; "".
    """

    def __init__(
        self, sock: socket.socket, server: Any, token: str, at_end: Callable[[], None], ca: str
    ) -> None:
        self._sock = sock
        self._server = server
        self._at_end = at_end
        self.token = token
        self.ca = ca
        self.host, self.port = sock.getsockname()[:2]
        everywhere = self.host in {"0.0.0.0", "::"}  # noqa: S104  (compared, not bound)
        name = socket.gethostname() if everywhere else f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{'https' if ca else 'http'}://{name}:{self.port}/"
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="m8d-web", daemon=True)
        try:
            self._start()
        except BaseException:  # Ctrl-C, too
            self.close()
            raise
        _know_forks()
        _pages.add(self)
        registry.close_at_end(self)

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # the process gets no other thread
            self._error = error
        deadline = time.monotonic() + _STARTING
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_LOOK)
        if not self._server.started:
            raise MultiworldError(
                f"the page at {self.url} was not served: {self._error or 'it did not start in time'}",
                rule=f"It starts within {_STARTING:g} s",
                next_step="See the log of uvicorn.error",
            )

    def __repr__(self) -> str:
        return f"<Page {self.url}>"

    @property
    def link(self) -> str:
        """The address to open once in a browser, with the token."""
        return f"{self.url}?token={quote(self.token, safe='')}"

    @property
    def exposed(self) -> bool:
        """Whether other hosts may reach it, and nothing is encrypted."""
        return not self.ca and not is_loopback(self.host)

    def close(self, timeout: float = _ENDING) -> bool:
        """Stop serving, within `timeout` seconds; return whether it is over. Idempotent."""
        self._server.should_exit = True
        self._server.config.app.state.feed.close()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Page:  # noqa: PYI034  (typing.Self is not in Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._sock])
        except BaseException as error:  # noqa: BLE001  (told to the thread that starts it)
            self._error = error
        finally:
            self._sock.close()
            self._at_end()
            _pages.discard(self)

    def _forked(self) -> None:
        """In a forked child, which has copies of the parent's sockets, and none of its threads."""
        transports = [each.transport for each in self._server.server_state.connections]
        sockets = [each.get_extra_info("socket") for each in transports if each is not None]
        descriptors = [each.fileno() for each in sockets if each is not None]  # None: it has just ended
        for descriptor in (self._sock.fileno(), *descriptors):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        with contextlib.suppress(OSError):
            self._sock.detach()
        self._at_end()


def serve_page(address: str = DEFAULT, *, token: str | None = None, hosts: Collection[str] = ()) -> Page:
    """Serve a page with this process's worlds: their members, what waits, faults, events. In a thread.

    Needs ``pip install 'm8d[web]'``. Who has the token sees names, hosts and pids, and can change nothing. In
    secure mode (``M8D_TLS_CERT``) it is HTTPS, and a client with a certificate of the job needs no token.

    Args:
        address: "HOST:PORT" to listen at; port 0: a free one.
        token: that requests need, of printable ASCII; None: ``M8D_WEB_TOKEN``, or else one that is drawn.
        hosts: names by which browsers reach it, beside this host's own and ``M8D_WEB_HOSTS``.

    Returns:
        The page; ``print(page.link)``.

    Raises:
        MultiworldError: the extra is not installed, the token is none, the address cannot be listened at, or
            a file of ``M8D_TLS_*`` cannot be used.
    """
    from multiworld.web.sources import ThisProcess  # noqa: PLC0415  (what only those need who serve)

    source = ThisProcess()
    try:
        page = serve(source, address, token=token, hosts=hosts, at_end=source.close)
    except BaseException:
        source.close()
        raise
    if page.exposed:
        _log.warning(EXPOSED, page.url)
    return page


def serve(
    source: Source,
    address: str = DEFAULT,
    *,
    token: str | None = None,
    hosts: Collection[str] = (),
    at_end: Callable[[], None] = lambda: None,
) -> Page:
    """Serve a page of any source; see `serve_page`.

    Args:
        source: of its data.
        address: as there.
        token: as there.
        hosts: as there.
        at_end: called when it is over, and in a forked child; harmless when repeated.
    """
    try:
        import uvicorn  # noqa: PLC0415  (of the extra)

        from multiworld.web.app import make_app  # noqa: PLC0415  (needs starlette)
        from multiworld.web.connections import BoundedProtocol  # noqa: PLC0415  (needs uvicorn)
        from multiworld.web.tls_connections import TlsProtocol  # noqa: PLC0415  (needs uvicorn)
    except ModuleNotFoundError as error:
        raise MultiworldError(
            f"the page needs {error.name}",
            rule="It is served by starlette and uvicorn, of the extra m8d[web]",
            next_step="pip install 'm8d[web]'",
        ) from error
    if token is None:
        # A file, or a secret of a cluster, often ends with a line's end.
        token = (settings.environment("M8D_WEB_TOKEN") or "").strip() or secrets.token_urlsafe(18)
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise MultiworldError(
            "a token for the page that is empty, or has other characters than printable ASCII",
            rule="It travels in an address and in a header",
            next_step="Leave it out: one is drawn",
        )
    credentials = current()
    http: Any = BoundedProtocol if credentials is None else functools.partial(TlsProtocol, credentials)
    sock = _listen(address)
    own = {socket.gethostname(), socket.gethostname().partition(".")[0], host_and_port(address)[0]}
    more = (settings.environment("M8D_WEB_HOSTS") or "").split(",")
    app = make_app(
        source, token=token, hosts={name.strip().lower() for name in (*own, *more, *hosts) if name}
    )
    config = uvicorn.Config(
        app, http=http, ws="none", loop="asyncio", lifespan="off", log_config=None,
        server_header=False, timeout_graceful_shutdown=1, backlog=64, proxy_headers=False,
    )  # fmt: skip
    # Not as an argument: that would switch off the access log of a server that the program has.
    config.access_log = False
    try:
        return Page(sock, uvicorn.Server(config), token, at_end, settings.load().tls_ca)
    except BaseException:
        sock.close()
        raise


def _listen(address: str) -> socket.socket:
    host, port = host_and_port(address)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(64)
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:  # a name of too long parts is no text for the resolver
        raise MultiworldError(
            f"{address}: {getattr(error, 'strerror', None) or error}",
            rule="The page listens at a free port of an address of this host",
            next_step="Give another one, or port 0",
        ) from error
    return sock


_pages: weakref.WeakSet[Page] = weakref.WeakSet()


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for page in tuple(_pages):
        page._forked()  # noqa: SLF001  (of this module)
    _pages.clear()
