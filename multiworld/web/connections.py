"""The page's connections: bounded in number, and each in the time that it has for a request.

uvicorn keeps a connection on which nothing is said for as long as the other side likes, and accepts as many
as come: a stranger could take all descriptors of the process that serves the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["FIRST", "MOST", "BoundedProtocol"]

MOST = 96
"""Connections at a time: three for each viewer."""

FIRST = 10.0
"""Seconds in which a request must be complete."""


class BoundedProtocol(H11Protocol):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False  # not into the log of a server that the program has
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A connection is there: refuse it where there are enough."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            transport.abort()
            return
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request, or several."""
        super().data_received(data)
        if self._answers():
            self._wait_no_more()  # the answer takes as long as it takes
        elif self._patience is None:
            self._wait()

    def on_response_complete(self) -> None:
        """The answer is sent: uvicorn waits for the next request, for 5 s, then for the other side to end."""
        self._wait()
        super().on_response_complete()
        if self._answers():  # the next request was there already
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._wait_no_more()
        self._patience = self.loop.call_later(FIRST, self._too_late)

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _too_late(self) -> None:
        # One that is closing waits for the other side, too: to take the last bytes, or to end TLS.
        self.transport.abort()
