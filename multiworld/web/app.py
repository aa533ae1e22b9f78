"""The page's HTTP interface, as an ASGI application; docs/web.md and ``/openapi.json`` describe it."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from multiworld.errors import MultiworldError, UnknownWorldError
from multiworld.logs.source import logger
from multiworld.run.control.client import LauncherSilentError
from multiworld.web.access import COOKIE, LET_IN, PEER, allowed, known_host
from multiworld.web.as_json import as_json
from multiworld.web.feed import Feed, in_a_thread
from multiworld.web.openapi import document
from multiworld.web.sources import RunOverError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Collection

    from starlette.types import ASGIApp, Receive, Scope, Send

    from multiworld.metrics.health import Health
    from multiworld.web.sources import Source

__all__ = ["make_app"]

PAGE = Path(__file__).with_name("page")

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "cross-origin-resource-policy": "same-origin",
}
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_OPEN = frozenset({"/live", "/ready"})
_MOST_BYTES = 1 << 16

_log = logger(__name__)


def make_app(source: Source, *, token: str, hosts: Collection[str] = ()) -> Starlette:
    """Return the application.

    Args:
        source: of the data.
        token: that every request needs, but those of ``/live`` and ``/ready``, and those over a connection
            with a certificate of the job; "": none does.
        hosts: names by which browsers reach it, in lower case; addresses and "localhost" always do.
    """
    routes = _Routes(source, token)
    paths = {
        "/": routes.page,
        "/static/{file}": routes.static,
        "/api/v1/view": routes.view,
        "/api/v1/events": routes.events,
        "/api/v1/worlds/{name:path}/pending": routes.pending,
        "/api/v1/processes/{process:path}/log": routes.log,
        "/openapi.json": routes.openapi,
        "/metrics": routes.metrics,
        "/live": routes.live,
        "/ready": routes.ready,
    }
    app = Starlette(
        routes=[Route(path, endpoint) for path, endpoint in paths.items()],
        middleware=[Middleware(_Guard, token=token, hosts=frozenset(hosts))],
    )
    app.state.feed = routes.feed
    return app


class _Guard:
    """Refuses requests without the token, and adds the headers that every answer has."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: frozenset[str]) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                if refusal is None and scope["path"] not in _OPEN and message["status"] != 401:
                    scope.setdefault("state", {})[LET_IN] = True
                present = {name for name, _ in message["headers"]}
                more = [(key.encode(), value.encode()) for key, value in _HEADERS.items()]
                message["headers"] = [
                    *message["headers"],
                    *(each for each in more if each[0] not in present),
                ]
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        headers = {key.lower(): value for key, value in request.headers.items()}
        # A rebound page can send a header, but has not the token.
        bearer = bool(self._token) and allowed(self._token, None, headers)
        if not bearer and not known_host(headers.get("host", ""), self._hosts):
            return PlainTextResponse(
                f"{headers.get('host', '')!r} is no name of this server. Come by its address, or set "
                "M8D_WEB_HOSTS to the names it has.\n",
                421,
            )
        path = scope["path"]
        if path in _OPEN or (path == "/" and "token" in request.query_params):
            return None
        if _is_let_in(request, self._token):
            return None
        return PlainTextResponse(
            "This page needs its token: open the address that its start printed, with ?token=..., or send "
            "the header Authorization: Bearer TOKEN.\n",
            401,
            {"www-authenticate": "Bearer"},
        )


def _is_let_in(request: Request, token: str) -> bool:
    """Whether a request has the token, or came with a certificate of the job."""
    if request.scope.get("state", {}).get(PEER):
        return True
    headers = {key.lower(): value for key, value in request.headers.items()}
    return allowed(token, request.cookies.get(cookie_name(request.scope)), headers)


def cookie_name(scope: Scope) -> str:
    """Return the cookie's name: browsers send the cookies of all ports of a host to each of them."""
    server = scope.get("server")
    return f"{COOKIE}_{server[1]}" if server else COOKIE


class _Routes:
    def __init__(self, source: Source, token: str) -> None:
        self._source = source
        self._token = token
        self.feed = Feed(source.view)
        # By their names, which are compared: the system is asked for no path of a client's making.
        self._files = {each.name: _KINDS[each.suffix] for each in PAGE.iterdir() if each.suffix in _KINDS}

    async def page(self, request: Request) -> Response:
        given = request.query_params.get("token")
        if given is None:
            return FileResponse(PAGE / "index.html", media_type="text/html; charset=utf-8")
        if not allowed(self._token, given, {}):
            return PlainTextResponse("This is not the token of this page.\n", 401)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            cookie_name(request.scope), given, httponly=True, samesite="lax", path="/",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer

    async def static(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in self._files:
            return PlainTextResponse("There is no such file.\n", 404)
        return FileResponse(PAGE / name, media_type=self._files[name])

    async def view(self, _: Request) -> Response:
        return await _answered(self.feed.latest())

    async def events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self.feed.full:
            return PlainTextResponse("Too many viewers: close another page first.\n", 503)
        stack = contextlib.ExitStack()
        stack.enter_context(self.feed.viewer())  # counted before anything is awaited
        try:
            await self.feed.latest()  # a source that has nothing to show is no stream
        except Exception as error:  # noqa: BLE001  (told to who asks)
            stack.close()
            return _no_view(error)

        async def lines() -> AsyncIterator[bytes]:
            async for kind, data in self.feed.stream():
                yield b"event: %s\ndata: %s\n\n" % (kind.encode(), as_json(data))

        return _Stream(lines(), stack)

    async def pending(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            found = await in_a_thread(partial(self._source.pending, name))
        except UnknownWorldError as error:
            return PlainTextResponse(f"{error}\n", 404)
        except (MultiworldError, LauncherSilentError) as error:
            return _no_view(error)
        return _json({"pending": found})

    async def log(self, request: Request) -> Response:
        stream, asked = request.query_params.get("stream", "stdout"), request.query_params.get("bytes", "")
        most = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 10 else _MOST_BYTES
        try:
            found = await in_a_thread(partial(self._source.log, request.path_params["process"], stream, most))
        except (MultiworldError, LauncherSilentError) as error:
            return _no_view(error)
        except OSError as error:
            return PlainTextResponse(
                f"{error}. Workers have log files under m8d-run --log-dir DIR --redirects 3, or --tee 3.\n",
                404,
            )
        return Response(found, media_type="text/plain; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        return _json(document())

    async def metrics(self, request: Request) -> Response:
        try:
            found = await in_a_thread(partial(self._source.metrics, request.headers.get("accept", "")))
        except (RunOverError, LauncherSilentError) as error:
            return _no_view(error)
        except MultiworldError as error:
            return PlainTextResponse(f"{error}\n", 404)
        return Response(found[0], headers={"content-type": found[1]})

    async def live(self, request: Request) -> Response:
        return self._health(request, await in_a_thread(self._source.live))

    async def ready(self, request: Request) -> Response:
        worlds = request.query_params.getlist("world")
        return self._health(request, await in_a_thread(partial(self._source.ready, worlds)))

    def _health(self, request: Request, health: Health) -> Response:
        # Without the token: the answer, not the names.
        text = health.text if _is_let_in(request, self._token) else ("ok" if health.ok else "no")
        return PlainTextResponse(f"{text}\n", 200 if health.ok else 503)


class _Stream(StreamingResponse):
    """A stream of events; `stack` is closed when it ends, however it does."""

    def __init__(self, lines: AsyncIterator[bytes], stack: contextlib.ExitStack) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stack:
            await super().__call__(scope, receive, send)


def _json(data: Any) -> Response:
    return Response(as_json(data), media_type="application/json")


async def _answered(coming: Awaitable[Any]) -> Response:
    try:
        return _json(await coming)
    except Exception as error:  # noqa: BLE001  (told to who asks)
        return _no_view(error)


def _no_view(error: Exception) -> Response:
    _log.warning("the page has nothing to show: %s", error)
    return PlainTextResponse(f"There is nothing to show: {error}\n", 503)
