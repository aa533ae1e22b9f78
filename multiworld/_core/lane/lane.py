"""One member's lane: its sends, its receives, and the connections to the other members.

Who reads and writes the connections asks here what to do:

    lane.peers[1].outgoing.views()      write these, then `wrote(count)`
    lane.peers[1].incoming.want()       read into this, then `got(count)`
    lane.next_read()                    a part of a message to read from its sender's memory, then `read`
    lane.take_finished()                what is over

Not thread-safe: callers hold a lock of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from multiworld._core.lane import frames
from multiworld._core.lane.operations import PayloadSource, Receive, Send
from multiworld._core.lane.peer import LaneState, MemoryRead, Peer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiworld._core.lane.operations import Arrival

__all__ = ["Lane"]

_Operation = TypeVar("_Operation", Send, Receive)


class Lane:
    """See the module.

    Args:
        peers: ranks of the other members.
        readable: those of them whose memory this process may read.

    Attributes:
        error: with which it ended; None while it lives.
        reads: the messages that are to be read from memory; not to be changed.
    """

    def __init__(self, peers: Iterable[int], readable: Iterable[int] = ()) -> None:
        self.error: Exception | None = None
        self._state = LaneState()
        self.reads = self._state.reads
        self._receives = 0
        may_read = frozenset(readable)
        self.peers = {rank: Peer(self._state, rank, readable=rank in may_read) for rank in peers}

    def send(
        self,
        peer: int,
        channel: int,
        tag: int,
        view: memoryview,
        address: int = 0,
        keep: object | None = None,
    ) -> Send:
        """Send bytes to a peer.

        Args:
            peer: its rank.
            channel: 0 to 2^56 - 1.
            tag: 0 to 2^32 - 1.
            view: contiguous bytes.
            address: where they lie in memory; 0 if they cannot be read there.
            keep: what owns them; it is held until the send is over.
        """
        send = Send(peer, channel, tag, view, address, keep)
        if self.error is not None:
            return self._refused(send)
        self.peers[peer].outgoing.post(send)
        return send

    def receive(
        self, source: int | None, channel: int, tag: int, view: memoryview, keep: object | None = None
    ) -> Receive:
        """Receive a message of exactly ``len(view)`` bytes from rank `source`; None: from any.

        What owns the memory of `view` is held as `keep` until the receive is over.
        """
        self._receives += 1
        receive = Receive(source, channel, tag, view, self._receives, keep)
        if self.error is not None:
            return self._refused(receive)
        arrival = self._state.matching.post(receive)
        if arrival is not None:
            self.peers[arrival.peer].matched(arrival, receive)
            return receive
        for peer in self.peers.values() if source is None else (self.peers[source],):
            if peer.holds:
                peer.want(receive)
        return receive

    def drain(self, peer: int) -> Send:
        """Return a send without bytes that is over when receives there have taken all that was sent before.

        It is over, too, once `lost` says that none will.
        """
        send = Send(peer, 0, 0, memoryview(b""))
        if self.error is not None:
            return self._refused(send)
        self.peers[peer].outgoing.drain(send)
        return send

    def flush(self, peer: int) -> Send | None:
        """Return a send without bytes that is over when the control frames that wait for a peer are written.

        None if there are none, or a send waits to be written as well.
        """
        send = Send(peer, 0, 0, memoryview(b""))
        return send if self.peers[peer].outgoing.flush(send) else None

    def lost(self, peer: int) -> None:
        """The connection to a peer has ended."""
        self.peers[peer].outgoing.give_up_drains()

    def quiet(self, peer: Peer) -> bool:
        """Whether the next message of a peer goes to the receive that is posted next for it, if they fit."""
        return (
            self._state.matching.empty
            and not peer.holds
            and peer.incoming.between_frames
            and self.error is None
        )

    def cancel(self, receive: Receive) -> bool:
        """Take a receive back; its buffer is the caller's again. What had come goes to the next receive.

        A message that was to be read from memory is then read anew, and a part of it that the caller was told
        to read is void; it may not be being read any more.

        Returns:
            False if it is over.
        """
        if receive.done:
            return False
        arrival = receive.arrival
        receive.done, receive.arrival, receive.keep, receive.sender = True, None, None, None
        if self.error is not None:
            self._state.matched.discard(receive)
        elif arrival is None:
            self._state.matching.cancel(receive)
        else:
            self.peers[arrival.peer].give_back(arrival, receive)
        return True

    def take_back(self, receive: Receive) -> None:
        """Cancel a receive even if it is over: its message, copied from ``receive.view``, goes to the next.

        It has its old place among its sender's messages. The buffer, which must still be there, is the
        caller's again. Nothing happens if the receive ended with an error, or was cancelled or taken back, or
        if the lane has ended.
        """
        if not receive.done:
            self.cancel(receive)
        elif receive.sender is not None and receive.error is None and self.error is None:
            sender, receive.sender = receive.sender, None
            self.peers[sender].restore(receive)

    def drop(self, channel: int) -> None:
        """Forget the messages of a channel that have come and have no receive: their senders get credit."""
        for arrival in self._state.matching.drop(channel):
            self.peers[arrival.peer].drop(arrival)

    def has_come(self, channel: int) -> bool:
        """Whether a message of a channel has come and has no receive."""
        return self._state.matching.has_come(channel)

    def next_read(self) -> MemoryRead | None:
        """Return a part of a message to be read from its sender's memory; the messages have turns.

        `read` comes before the next call.
        """
        if not self._state.reads:
            return None
        arrival = self._state.reads[0]
        view, at = arrival.view, arrival.received
        assert view is not None  # noqa: S101  (it has a receive)
        return MemoryRead(arrival.address + at, view[at : at + frames.PIECE], arrival)

    def read(self, read: MemoryRead, *, succeeded: bool) -> None:
        """A `MemoryRead` is over. If it failed, the bytes travel, and no more of that peer's are read."""
        arrival = read.arrival
        if self.error is not None:
            if arrival.receive is not None and not arrival.receive.done:
                self._state.over(arrival.receive, self.error)
        elif arrival.source is PayloadSource.MEMORY:
            self.peers[arrival.peer].read(read, succeeded=succeeded)

    def take_finished(self) -> list[Send | Receive]:
        """Return what is over since the last call; what was cancelled is not among it."""
        taken = self._state.finished[:]
        self._state.finished.clear()
        return taken

    def fail(self, error: Exception, being_read: Arrival | None = None) -> None:
        """End the lane: what is not over fails with `error`, and so does what begins later.

        The receive of the message of which a part is `being_read` into its buffer fails with the next `read`.
        """
        if self.error is not None:
            return
        self.error = error
        for peer in self.peers.values():
            peer.outgoing.fail(error)
        waits = None if being_read is None else being_read.receive
        for receive in (*self._state.matching.clear(), *self._state.matched):
            if receive is not waits:
                self._state.over(receive, error)
        self._state.reads.clear()

    def _refused(self, operation: _Operation) -> _Operation:
        operation.done, operation.error, operation.keep = True, self.error, None
        self._state.finished.append(operation)
        return operation
