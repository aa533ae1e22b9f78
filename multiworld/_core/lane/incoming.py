"""Reader of one member's stream: headers are read ahead, payloads go where they belong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from multiworld._core.lane import frames
from multiworld._core.lane.frames import ProtocolError

if TYPE_CHECKING:
    from multiworld._core.lane.operations import Arrival

__all__ = ["Handler", "Incoming"]

_AHEAD = 4096  # bytes: a header and a small payload in one read; more would be copied once more


class Handler(Protocol):
    """What is told of frames."""

    def eager(self, channel: int, tag: int, size: int) -> Arrival:
        """A whole message follows, or is empty; returns where it goes."""

    def announced(self, channel: int, tag: int, id: int, size: int, address: int) -> None:
        """A message is announced."""

    def data(self, id: int, size: int) -> Arrival:
        """A part of an announced message follows; returns where it goes."""

    def arrived(self, arrival: Arrival) -> None:
        """What followed is there."""

    def control(self, kind: int, channel: int, tag: int, id: int, size: int) -> None:
        """Any other frame."""


class Incoming:
    """The reading half of a connection: read into `want()`, then say how much came with `got`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._ahead = memoryview(bytearray(_AHEAD))
        self._have = 0  # bytes of it that are not parsed yet
        self._arrival: Arrival | None = None  # whose payload comes
        self._left = 0  # bytes of that payload

    @property
    def between_frames(self) -> bool:
        """Whether nothing is half read."""
        return self._arrival is None and not self._have

    def want(self) -> memoryview:
        """Return where the next bytes go; it holds until the lane is asked for something else."""
        arrival = self._arrival
        if arrival is None:
            return self._ahead[self._have :]
        return _rest(arrival, self._left)

    def got(self, count: int) -> None:
        """`count` bytes are in what `want` returned last.

        Raises:
            ProtocolError: they break a rule.
        """
        if self._arrival is None:
            self._have += count
            self._parse()
        else:
            self._received(count)

    def whole(self, count: int, channel: int, tag: int, size: int) -> memoryview | None:
        """Return the payload if the `count` bytes that came are exactly one small message of that kind.

        It is taken then, and `got` is not to be called. Only between frames.
        """
        if count != frames.HEADER.size + size:
            return None
        first, under, _, length, _ = frames.HEADER.unpack_from(self._ahead)
        if first != frames.EAGER | channel << 8 or under != tag or length != size:
            return None
        return self._ahead[frames.HEADER.size : count]

    def _received(self, count: int) -> None:
        arrival = self._arrival
        assert arrival is not None  # noqa: S101  (payload comes)
        arrival.received += count
        self._left -= count
        if not self._left:
            self._arrival = None
            self._handler.arrived(arrival)

    def _parse(self) -> None:
        at, have, ahead = 0, self._have, self._ahead
        while have - at >= frames.HEADER.size:
            first, *others = frames.HEADER.unpack_from(ahead, at)
            at += frames.HEADER.size
            self._frame(first & 0xFF, first >> 8, *others)
            if self._arrival is not None:
                here = min(self._left, have - at)
                if here:
                    _rest(self._arrival, here)[:] = ahead[at : at + here]
                    at += here
                    self._received(here)
                if self._arrival is not None:
                    break
        if at:
            ahead[: have - at] = bytes(ahead[at:have])
            self._have = have - at

    def _frame(self, kind: int, channel: int, tag: int, id: int, size: int, address: int) -> None:
        if kind == frames.EAGER:
            if size > frames.EAGER_LIMIT:
                raise ProtocolError(f"a message of {size} bytes came without being asked for")
            self._follows(self._handler.eager(channel, tag, size), size)
        elif kind == frames.DATA:
            if size > frames.CHUNK:
                raise ProtocolError(f"a part of {size} bytes came")
            self._follows(self._handler.data(id, size), size)
        elif kind == frames.ANNOUNCE:
            self._handler.announced(channel, tag, id, size, address)
        elif kind in (frames.CLEAR, frames.DONE, frames.CREDIT, frames.HELD, frames.WANT):
            self._handler.control(kind, channel, tag, id, size)
        else:
            raise ProtocolError(f"a frame of kind {kind} came, which this version does not know")

    def _follows(self, arrival: Arrival, size: int) -> None:
        if size:
            self._arrival, self._left = arrival, size
        else:
            self._handler.arrived(arrival)


def _rest(arrival: Arrival, most: int) -> memoryview:
    view = arrival.view
    if view is None:  # no receive has it
        view = arrival.view = memoryview(bytearray(arrival.size))
    return view[arrival.received : arrival.received + most]
