"""Serving the page: a socket, a thread with its own event loop, and what ends both."""

from __future__ import annotations

import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld import settings
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from multiworld.web.sources import Source

__all__ = ["Page", "serve", "serve_page"]

DEFAULT = "127.0.0.1:0"

_STARTING = 15.0
_ENDING = 5.0


@dataclass
class Page:
    """A page that is served. `close`, or the end of the program, ends it; it is a context manager, too.

    Attributes:
        url: its address, without the token.
        token: that it asks for.
        host, port: where it listens.
    """

    url: str
    token: str
    host: str
    port: int
    _end: Callable[[], None] = field(repr=False)

    @property
    def link(self) -> str:
        """The address to open once in a browser, with the token."""
        return f"{self.url}?token={self.token}"

    def close(self) -> None:
        """Stop serving; takes 5 s at most. Idempotent."""
        self._end()

    def __enter__(self) -> Page:  # noqa: PYI034  (typing.Self is not in Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_page(address: str = DEFAULT, *, token: str | None = None, hosts: Collection[str] = ()) -> Page:
    """Serve a page with this process's worlds: their members, what waits, faults, events. In a thread.

    Needs ``pip install 'm8d[web]'``. Who has the token sees names, hosts and pids, and can change nothing.

    Args:
        address: "HOST:PORT" to listen at; port 0: a free one.
        token: that requests need; None: ``M8D_WEB_TOKEN``, or else one that is drawn.
        hosts: names by which browsers reach it, beside this host's own and ``M8D_WEB_HOSTS``.

    Returns:
        The page; ``print(page.link)``.

    Raises:
        MultiworldError: the extra is not installed, or the address cannot be listened at.
    """
    from multiworld.web.sources import ThisProcess  # noqa: PLC0415  (what only those need who serve)

    source = ThisProcess()
    try:
        return serve(source, address, token=token, hosts=hosts, at_end=source.close)
    except BaseException:
        source.close()
        raise


def serve(
    source: Source,
    address: str = DEFAULT,
    *,
    token: str | None = None,
    hosts: Collection[str] = (),
    at_end: Callable[[], None] | None = None,
) -> Page:
    """Serve a page of any source; see `serve_page`.

    Args:
        source: of its data.
        address: as there.
        token: as there.
        hosts: as there.
        at_end: called when it is over.
    """
    try:
        import uvicorn  # noqa: PLC0415  (of the extra)

        from multiworld.web.app import make_app  # noqa: PLC0415  (needs starlette)
    except ModuleNotFoundError as error:
        raise MultiworldError(
            f"the page needs {error.name}",
            rule="It is served by starlette and uvicorn, of the extra m8d[web]",
            next_step="pip install 'm8d[web]'",
        ) from error
    if token is None:
        token = settings.environment("M8D_WEB_TOKEN") or secrets.token_urlsafe(18)
    sock = _listen(address)
    host, port = sock.getsockname()[:2]
    own = {socket.gethostname(), socket.gethostname().partition(".")[0], address.rpartition(":")[0]}
    more = (settings.environment("M8D_WEB_HOSTS") or "").split(",")
    app = make_app(
        source, token=token, hosts={name.strip().lower() for name in (*own, *more, *hosts) if name}
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            server_header=False, limit_concurrency=128, timeout_graceful_shutdown=1, backlog=64,
            proxy_headers=False,
        )
    )  # fmt: skip

    def run() -> None:
        try:
            server.run(sockets=[sock])
        finally:
            sock.close()
            if at_end is not None:
                at_end()

    thread = threading.Thread(target=run, name="m8d-web", daemon=True)

    def end() -> None:
        server.should_exit = True
        app.state.close()
        if threading.current_thread() is not thread:
            thread.join(_ENDING)

    thread.start()
    shown = socket.gethostname() if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host  # noqa: S104
    return Page(f"http://{shown}:{port}/", token, host, port, end)


def _listen(address: str) -> socket.socket:
    host, colon, text = address.rpartition(":")
    host = host.strip("[]")
    if not (colon and host and text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise MultiworldError(
            f"{address!r} to serve the page at",
            rule="It is HOST:PORT; port 0 takes a free one",
            next_step="As in 127.0.0.1:8080",
        )
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, int(text), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(64)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise MultiworldError(
            f"{address}: {error.strerror or error}",
            rule="The page listens at a free port of an address of this host",
            next_step="Give another one, or port 0",
        ) from error
    return sock
