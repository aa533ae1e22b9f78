"""The page's connections in secure mode: a handshake with the present certificate, then HTTP as ever.

Each connection gets the context of the moment in which it comes: uvicorn would keep one from its start on,
leave 60 s to a handshake, and not count those that go on.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from multiworld._net.tls.session import RefusedError
from multiworld._net.tls.visitors import HANDSHAKE, is_peer
from multiworld.logs.source import logger
from multiworld.web import connections
from multiworld.web.access import PEER

if TYPE_CHECKING:
    from multiworld._net.tls.credentials import Credentials

__all__ = ["TlsProtocol"]

_GOODBYE: dict[str, Any] = {"ssl_shutdown_timeout": 3600.0} if sys.version_info >= (3, 11) else {}
"""The time of `BoundedProtocol` ends it: a slow reader has a part of an answer to read yet."""

_log = logger(__name__)


class TlsProtocol(asyncio.Protocol):
    """See the module. It counts among uvicorn's connections until the handshake is over.

    Args:
        credentials: of this process.
        arguments: those of `BoundedProtocol`, which has the connection from then on.

    Attributes:
        transport: the connection below TLS.
        waits_from, ended: as those of `BoundedProtocol`.
    """

    def __init__(self, credentials: Credentials, **arguments: Any) -> None:
        self.transport: Any = None
        self.waits_from: float | None = None
        self.ended = False
        self._credentials = credentials
        self._arguments = arguments
        self._among: set[Any] = arguments["server_state"].connections
        self._early = bytearray()
        self._lost = False
        self._inner: connections.BoundedProtocol | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        """A connection is there: make room for it and begin the handshake, or refuse it."""
        self.transport = transport
        self._among.add(self)
        if connections.has_room(self, self._among):
            loop = asyncio.get_running_loop()
            self.waits_from = loop.time()
            self._task = loop.create_task(self._shake_hands())

    async def _shake_hands(self) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                self.transport, self, self._credentials.context_for_visitors(), server_side=True,
                ssl_handshake_timeout=HANDSHAKE, **_GOODBYE,
            )  # fmt: skip
        except OSError as error:
            _log.debug("a handshake has failed: %s", error)
            return
        finally:
            self._among.discard(self)
        if secured is None or self._lost:  # it was closed meanwhile
            return
        try:
            peer = is_peer(secured.get_extra_info("ssl_object"), self._credentials.identity)
        except RefusedError as error:
            _log.warning("a client of the page is refused: %s", error)
            secured.abort()
            return
        state = {**self._arguments["app_state"], PEER: peer}
        self._inner = connections.BoundedProtocol(**{**self._arguments, "app_state": state})
        self._inner.connection_made(secured)
        if self._early:
            self._inner.data_received(bytes(self._early))

    def shutdown(self) -> None:
        """The server ends in the middle of the handshake."""
        self.end()

    def end(self) -> None:
        """End it at once."""
        self.ended = True
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand plain bytes on."""
        if self._inner is None:
            self._early += data
        else:
            self._inner.data_received(data)

    def eof_received(self) -> None:
        """Hand it on: the connection is closed."""
        if self._inner is not None:
            self._inner.eof_received()

    def pause_writing(self) -> None:
        """Hand it on."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Hand it on."""
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._lost = True
        self._among.discard(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)
