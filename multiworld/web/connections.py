"""The page's connections: bounded in number, and each in the time that it has for a request.

uvicorn keeps a connection on which nothing is said for as long as the other side likes, and accepts as many
as come: a stranger could take all descriptors of the process that serves the page. Where there are enough,
the one that has said nothing for longest makes room, so that strangers do not keep others out either. An
answer that is not read is no reason to keep a connection; one that is read slowly is. In secure mode one
without a certificate is ended after `SILENCE` without a byte, until a request on it had the token.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from multiworld._net.tls.visitors import SILENCE
from multiworld.web.access import LET_IN, PEER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

__all__ = ["FIRST", "MOST", "BoundedProtocol", "has_room"]

MOST = 96
"""Connections at a time: three for each viewer."""

FIRST = 10.0
"""Seconds in which a request must be complete."""

_TIMES = 6
"""Times `FIRST` in which a part of an answer must be read: kernels say it in steps, of 64 KiB on one host."""

# struct tcp_info of linux/tcp.h: packets on their way, bytes acknowledged so far, bytes that wait to be sent.
_INFO = struct.Struct("=24xI92xQ16xI")


def has_room(new: Any, among: Iterable[Any]) -> bool:
    """Whether a new connection may stay `among` the others; another one is ended for it, or else itself."""
    held = [each for each in among if not each.ended]
    if len(held) <= MOST:
        return True
    silent = [each for each in held if each.waits_from is not None]
    last = min(silent, key=lambda each: each.waits_from, default=new)
    last.end()
    return last is not new


class BoundedProtocol(H11Protocol):
    """See the module.

    Attributes:
        waits_from: by the loop's clock, since when it waits for a request, or for an answer to be read; None:
            it answers one.
        ended: whether it was ended here, which uvicorn learns in the loop's next turn.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False  # not into the log of a server that the program has
        self.waits_from: float | None = None
        self.ended = False
        self._patience: asyncio.TimerHandle | None = None
        self._sock: Any = None
        self._acknowledged = 0
        self._left = _TIMES
        self._known = False

    def connection_made(self, transport: Any) -> None:
        """A connection is there: make room for it, or refuse it."""
        super().connection_made(transport)
        self._sock = transport.get_extra_info("socket")
        if has_room(self, self.connections):
            self._wait()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request, or several."""
        super().data_received(data)
        if self._works():
            self._wait_no_more()  # the answer takes as long as it takes
        elif self._patience is None:
            self._wait()
        elif self._strange():
            self._patience.cancel()
            self._begin()

    def on_response_complete(self) -> None:
        """The answer is sent: uvicorn waits for the next request, for 5 s, then for the other side to end."""
        self._wait()
        super().on_response_complete()
        if self._works():  # the next request was there already
            self._wait_no_more()

    def pause_writing(self) -> None:
        """What was written has to be read first; uvicorn would wait for that without end."""
        super().pause_writing()
        if self._patience is None:
            self._wait()

    def resume_writing(self) -> None:
        """Enough was read."""
        super().resume_writing()
        if self._works():
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _works(self) -> bool:
        """Whether an answer is made, rather than the other side waited for."""
        answers = self.cycle is not None and not self.cycle.response_complete
        return answers and not self.flow.write_paused and not self.transport.is_closing()

    def _wait(self) -> None:
        self._wait_no_more()
        self.waits_from = self.loop.time()
        self._acknowledged, self._left = self._read()[0], _TIMES
        self._begin()

    def _begin(self) -> None:
        """Wait on: a stranger until it is silent, and no longer than others."""
        most = FIRST
        if self.waits_from is not None and self._strange():
            most = min(SILENCE, self.waits_from + FIRST - self.loop.time())
        self._patience = self.loop.call_later(most, self._lose_patience)

    def _strange(self) -> bool:
        """Whether, in secure mode, the other side has shown neither a certificate nor the token so far."""
        if self.scope is not None:
            self._known = self._known or self.scope["state"].get(LET_IN, False)
        return self.app_state.get(PEER) is False and not self._known

    def _lose_patience(self) -> None:
        acknowledged, unread = self._read()
        self._left -= 1
        if unread and acknowledged > self._acknowledged:
            self._wait()
        elif unread and self._left > 0 and not self._strange():
            self._begin()
        else:
            self.end()

    def _read(self) -> tuple[int, bool]:
        """Return how many bytes the other side has acknowledged, and whether more are on their way.

        The kernel's numbers: with a slow reader, asyncio's buffers can stay the same for minutes.
        """
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            sent, acknowledged, waiting = _INFO.unpack(info)
        except (OSError, struct.error):  # it has ended; a kernel that does not say it
            return 0, False
        return acknowledged, sent + waiting > 0

    def _wait_no_more(self) -> None:
        self.waits_from = None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def end(self) -> None:
        """End it at once."""
        self.ended = True
        # One that is closing waits for the other side, too: to take the last bytes, or to end TLS.
        self.transport.abort()
