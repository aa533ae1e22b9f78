"""One connection of a lane: frames that come from a member, and what they mean for sends and receives."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld._core.lane import frames
from multiworld._core.lane.frames import ProtocolError
from multiworld._core.lane.incoming import Incoming
from multiworld._core.lane.matching import Matching
from multiworld._core.lane.operations import Arrival, PayloadSource, Receive, SizesDifferError
from multiworld._core.lane.outgoing import Outgoing

if TYPE_CHECKING:
    from multiworld._core.lane.operations import Send

__all__ = ["LaneState", "MemoryRead", "Peer"]

_CREDIT_FROM = (
    frames.BUDGET // 4
)  # bytes: so few frames that they cost nothing, and long before the sender stops


@dataclass(frozen=True)
class MemoryRead:
    """Read a part of a message from its sender's memory: then call `Lane.read`.

    Attributes:
        address: in the memory of the process of rank `arrival.peer`.
        view: gets the bytes; all of it.
        arrival: the message.
    """

    address: int
    view: memoryview
    arrival: Arrival


@dataclass
class LaneState:
    """What the connections of a lane have in common.

    Attributes:
        matching: receives without a message, and messages without a receive.
        matched: receives whose messages are coming.
        finished: sends and receives that are over, for the caller to take.
        reads: messages to be read from memory; the first is next.
    """

    matching: Matching = field(default_factory=Matching)
    matched: set[Receive] = field(default_factory=set)
    finished: list[Send | Receive] = field(default_factory=list)
    reads: deque[Arrival] = field(default_factory=deque)

    def over(self, receive: Receive, error: Exception | None = None) -> None:
        """Note the end of a receive."""
        receive.done, receive.error, receive.arrival, receive.keep = True, error, None, None
        self.matched.discard(receive)
        self.finished.append(receive)


class Peer:
    """The connection to one other member.

    Args:
        state: of the lane.
        rank: of the member.
        readable: whether this process may read that one's memory.

    Attributes:
        outgoing, incoming: its halves.
        holds: whether messages wait there for credit.
        order: number of its messages that matching has seen.
    """

    def __init__(self, state: LaneState, rank: int, *, readable: bool) -> None:
        self.rank = rank
        self.holds = False
        self.outgoing = Outgoing(state.finished)
        self.incoming = Incoming(self)
        self._state = state
        self._readable = readable
        self.order = 0
        self._owed = 0  # bytes that receives took, and that are not credited yet
        self._coming: dict[int, Arrival] = {}  # asked for, by id

    # -- what `incoming` tells -------------------------------------------------------------------------------

    def eager(self, channel: int, tag: int, size: int) -> Arrival:
        """See `incoming.Handler`."""
        arrival = self._arrival(channel, tag, size)
        self._offer(arrival)
        return arrival

    def announced(self, channel: int, tag: int, id: int, size: int, address: int) -> None:
        """See `incoming.Handler`."""
        arrival = self._arrival(channel, tag, size)
        arrival.id, arrival.address, arrival.source = id, address, PayloadSource.ANNOUNCED
        self._offer(arrival)

    def data(self, id: int, size: int) -> Arrival:
        """See `incoming.Handler`."""
        arrival = self._coming.get(id)
        if arrival is None or arrival.received + size > arrival.size:
            raise ProtocolError(f"{size} bytes of message {id} came, and were not asked for")
        return arrival

    def arrived(self, arrival: Arrival) -> None:
        """See `incoming.Handler`."""
        if arrival.received < arrival.size:
            return
        arrival.here = True
        if arrival.id:
            self._coming.pop(arrival.id, None)
        if arrival.receive is not None:
            self._state.over(arrival.receive)

    def control(self, kind: int, channel: int, tag: int, id: int, size: int) -> None:
        """See `incoming.Handler`."""
        if kind == frames.CREDIT:
            self.outgoing.credited(size)
        elif kind == frames.WANT:
            self.outgoing.wanted(channel, tag)
        elif kind == frames.CLEAR:
            self.outgoing.cleared(id)
        elif kind == frames.DONE:
            self.outgoing.given_back(id)
        else:
            self.holds = bool(size)
            if self.holds:
                for receive in self._state.matching.waiting_for(self.rank):
                    self.want(receive)
                self._give_credit()

    def taken(self, size: int) -> None:
        """A receive took an eager message of that size without matching."""
        self._owed += size + frames.OVERHEAD
        if self._owed >= _CREDIT_FROM:
            self._give_credit()

    # -- what the lane tells ---------------------------------------------------------------------------------

    def want(self, receive: Receive) -> None:
        """Ask for a message that is held there and fits a receive."""
        self.outgoing.tell(frames.pack(frames.WANT, channel=receive.channel, tag=receive.tag))

    def matched(self, arrival: Arrival, receive: Receive) -> None:
        """Give a message to the receive that it matched."""
        receive.sender, receive.place, receive.announced = self.rank, arrival.order, arrival.id
        self._owed += _cost(arrival)
        self._give_credit()
        if arrival.size != len(receive.view):
            if arrival.source is PayloadSource.ANNOUNCED:
                self.outgoing.tell(frames.pack(frames.DONE, id=arrival.id))
            self._state.over(receive, SizesDifferError(arrival.size, len(receive.view), self.rank))
            return
        if arrival.view is not None:  # bytes have come already
            receive.view[: arrival.received] = arrival.view[: arrival.received]
        arrival.view, arrival.receive, receive.arrival = receive.view, receive, arrival
        if arrival.here:
            self._state.over(receive)
            return
        self._state.matched.add(receive)
        if arrival.source is PayloadSource.ANNOUNCED:
            self._fetch(arrival)

    def give_back(self, arrival: Arrival, receive: Receive) -> None:
        """Take a message from a receive that is cancelled: it waits again."""
        self._state.matched.discard(receive)
        if arrival.source is PayloadSource.MEMORY:
            # A new one, so that a read of the old one is known to be void. The sender keeps the bytes until
            # DONE: they are asked for again.
            arrival.source, arrival.receive = PayloadSource.VOID, None
            self._state.reads.remove(arrival)
            again = Arrival(self.rank, arrival.channel, arrival.tag, arrival.size, arrival.order)
            again.id, again.address, again.source = arrival.id, arrival.address, PayloadSource.ANNOUNCED
            arrival = again
        else:
            kept = memoryview(bytearray(arrival.size))
            kept[: arrival.received] = receive.view[: arrival.received]
            arrival.view, arrival.receive = kept, None
        self._owed -= _cost(arrival)
        self._offer(arrival)

    def restore(self, receive: Receive) -> None:
        """Take its message from a receive that is over: it waits again, whole."""
        size = len(receive.view)
        arrival = Arrival(self.rank, receive.channel, receive.tag, size, receive.place)
        arrival.id, arrival.received, arrival.here = receive.announced, size, True
        arrival.view = memoryview(bytearray(receive.view))
        self._owed -= _cost(arrival)  # it may have been credited; the next receive that takes it adds it
        self._offer(arrival)

    def drop(self, arrival: Arrival) -> None:
        """No receive will want this message, which waits for one."""
        if arrival.source is PayloadSource.ANNOUNCED:
            self.outgoing.tell(frames.pack(frames.DONE, id=arrival.id))
        self._owed += _cost(arrival)
        self._give_credit()

    def read(self, read: MemoryRead, *, succeeded: bool) -> None:
        """A part of a message was read from memory, or cannot be."""
        arrival = read.arrival
        self._state.reads.remove(arrival)
        if not succeeded:
            self._readable, arrival.received = False, 0
            self._fetch(arrival)
            return
        arrival.received += len(read.view)
        if arrival.received < arrival.size:
            self._state.reads.append(arrival)  # after the others
            return
        arrival.source = PayloadSource.WIRE
        self.outgoing.tell(frames.pack(frames.DONE, id=arrival.id))
        self.arrived(arrival)

    # -- inside ----------------------------------------------------------------------------------------------

    def _arrival(self, channel: int, tag: int, size: int) -> Arrival:
        self.order += 1
        return Arrival(self.rank, channel, tag, size, self.order)

    def _offer(self, arrival: Arrival) -> None:
        receive = self._state.matching.arrive(arrival)
        if receive is not None:
            self.matched(arrival, receive)

    def _fetch(self, arrival: Arrival) -> None:
        if self._readable and arrival.address and arrival.view is not None:
            arrival.source = PayloadSource.MEMORY
            self._state.reads.append(arrival)
        else:
            arrival.source = PayloadSource.WIRE
            self._coming[arrival.id] = arrival
            self.outgoing.tell(frames.pack(frames.CLEAR, id=arrival.id))

    def _give_credit(self) -> None:
        if self._owed >= _CREDIT_FROM or (self.holds and self._owed > 0):
            self.outgoing.tell(frames.pack(frames.CREDIT, size=self._owed))
            self._owed = 0


def _cost(arrival: Arrival) -> int:
    return frames.OVERHEAD if arrival.id else frames.cost(arrival.size)
