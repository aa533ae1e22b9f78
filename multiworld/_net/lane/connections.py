"""The connections of a lane's endpoint: reading and writing them, without waiting.

Every call is made under the endpoint's lock. The protocol (`multiworld._core.lane`) says what is read where,
and what is written.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import select
import socket
from collections import Counter
from typing import TYPE_CHECKING

from multiworld._core.lane.lane import Lane
from multiworld._core.reraise import raised_by_the_program
from multiworld._net.lane import graceful_close
from multiworld._net.tls.stream import TlsStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from multiworld._net.tls.stream import Stream

__all__ = ["NOW", "Connections", "Next"]

NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
"""Flags of every read and write."""

_TURN = 4 << 20  # bytes read of, or written to, one connection before others have their turn
_LOCAL = {errno.EFAULT, errno.ENOMEM, errno.ENOBUFS, errno.EMSGSIZE}
"""Why a write may fail though the other end is there: no end would come from it."""
_ENDED = select.POLLERR | select.POLLHUP | select.POLLNVAL


class Next(enum.Enum):
    """What a connection waits for."""

    READ = "read"
    WRITE = "write"
    """And to be read."""
    NOTHING = "nothing"
    """It has ended, or the lane has."""


class Connections:
    """See the module.

    Args:
        sockets: connected stream sockets by rank; they belong to this from now on.
        readable: ranks of the members whose memory can be read.
        lost: told of a connection that ended, with its rank and why.

    Attributes:
        lane: the protocol.
        poll: knows what each connection waits for.
        sockets: those that have not ended.
        blocked: ranks whose connections are to be written when that is possible.
        on_blocked: each is called with a rank that becomes `blocked`.
    """

    def __init__(
        self,
        sockets: Mapping[int, Stream],
        readable: Iterable[int],
        lost: Callable[[int, Exception], None] | None,
    ) -> None:
        self.lane = Lane(sockets, readable=readable)
        self.poll = select.poll()
        self.sockets = dict(sockets)
        self.ranks = {each.fileno(): rank for rank, each in sockets.items()}
        self.blocked: set[int] = set()
        self.on_blocked: dict[object, Callable[[int], None]] = {}
        self._lost = lost
        self._mute: set[int] = set()  # ranks to which nothing can be written any more
        self._held: Counter[int] = Counter()
        self._ended: dict[int, tuple[Stream, bool]] = {}  # of those that are held; for `closing.close`
        for each in sockets.values():
            if each.family in (socket.AF_INET, socket.AF_INET6):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.poll.register(each, select.POLLIN)

    def go_on(self, rank: int, events: int) -> None:
        """Read and write a connection as far as it goes; `events`: what `poll` said."""
        if events & (select.POLLIN | _ENDED):
            self.read(rank)
        if events & select.POLLOUT:
            self.write(rank)

    def read(self, rank: int) -> None:
        """Read what has come, and write what that asks for."""
        if self.lane.error is not None:  # what it was read into may be in other use
            return
        connection, incoming = self.sockets[rank], self.lane.peers[rank].incoming
        left = _TURN
        try:
            while left > 0:
                want = incoming.want()
                count = connection.recv_into(want, 0, NOW)
                if not count:
                    self._end(rank, ConnectionResetError("the connection was closed by its other end"))
                    return
                incoming.got(count)
                # Fewer bytes than wanted were all, but for the end, if that is due.
                left = left - count if count == len(want) or rank in self._mute else 0
                if left <= 0 and _holds_back(connection):
                    left = 1
        except BlockingIOError as error:
            if raised_by_the_program(error):
                raise
            left = 0  # that was all
        except OSError as error:  # a ProtocolError is one
            if raised_by_the_program(error):
                raise
            self._end(rank, error)
            return
        if self.lane.peers[rank].outgoing.pending:
            self.write(rank)

    def read_rest(self, rank: int) -> None:
        """Read on where a part of what has come is out of `poll`'s sight."""
        if rank in self.sockets and _holds_back(self.sockets[rank]):
            self.read(rank)

    def write(self, rank: int) -> None:
        """Write what is to be written, as far as it goes in one turn."""
        connection, outgoing = self.sockets.get(rank), self.lane.peers[rank].outgoing
        if connection is None or rank in self._mute or self.lane.error is not None:
            return
        left = _TURN
        try:
            while outgoing.pending and left > 0:
                count = connection.sendmsg(outgoing.views(), (), NOW)
                outgoing.wrote(count)
                left -= count
        except BlockingIOError as error:
            if raised_by_the_program(error):
                raise
            left = 0  # no more goes
        except OSError as error:
            if raised_by_the_program(error):
                raise
            # The other end is gone. What it had written is still to be read; the end comes after that.
            self._mute.add(rank)
            if rank in self.blocked:
                self.blocked.discard(rank)
                self.poll.modify(connection, select.POLLIN)
            self.read(rank)
            if error.errno in _LOCAL and rank in self.sockets:
                self._end(rank, error)
            return
        if not outgoing.pending:
            if rank in self.blocked:
                self.blocked.discard(rank)
                self.poll.modify(connection, select.POLLIN)
        elif rank not in self.blocked:
            self.blocked.add(rank)
            self.poll.modify(connection, select.POLLIN | select.POLLOUT)
            for call in self.on_blocked.values():
                call(rank)

    def write_all(self) -> None:
        """Write to all members for whom there is something."""
        for rank, peer in self.lane.peers.items():
            if peer.outgoing.pending:
                self.write(rank)

    def lives(self, rank: int) -> bool:
        """Whether the other end has not ended a connection, so far as it is known here, read or not."""
        if rank not in self.sockets:
            return False
        poll = select.poll()
        poll.register(self.sockets[rank], select.POLLRDHUP)
        return not poll.poll(0)

    def next(self, rank: int) -> Next:
        """Return what a connection waits for."""
        if rank not in self.sockets or self.lane.error is not None:
            return Next.NOTHING
        return Next.WRITE if rank in self.blocked else Next.READ

    def hold(self, rank: int | None) -> list[tuple[int, int]]:
        """Keep the descriptor of the connection to `rank` (None: of all) until `let_go`, also if it ends.

        Returns:
            Rank and descriptor of each that has not ended.
        """
        ranks = [each for each in self.sockets if rank in (None, each)]
        self._held.update(ranks)
        return [(each, self.sockets[each].fileno()) for each in ranks]

    def is_held(self, rank: int) -> bool:
        """Whether a loop looks at a connection."""
        return bool(self._held[rank])

    def let_go(self, rank: int) -> None:
        """Take one `hold` of a rank back."""
        self._held[rank] -= 1
        if not self._held[rank]:
            del self._held[rank]
            if (ended := self._ended.pop(rank, None)) is not None:
                graceful_close.close([ended])

    def say_goodbye(self) -> list[tuple[Stream, bool]]:
        """Tell all members that nothing more comes; there are no connections any more.

        What waits to be written belongs to sends that are not over.

        Returns:
            For `closing.close`: the sockets that are not held.
        """
        parted = []
        for rank, connection in list(self.sockets.items()):
            goodbye = connection, graceful_close.say_goodbye(connection)
            self._part(rank)
            if self._held[rank]:
                self._ended[rank] = goodbye
            else:
                parted.append(goodbye)
        return parted

    def abandon(self) -> None:
        """Close the descriptors only: a forked process's, whose connections are its parent's."""
        for each in (*self.sockets.values(), *(ended for ended, _ in self._ended.values())):
            each.close()

    def _end(self, rank: int, error: Exception) -> None:
        self._close(rank)
        self.lane.lost(rank)
        if self.lane.error is None and self._lost is not None:
            self._lost(rank, error)

    def _part(self, rank: int) -> Stream:
        connection = self.sockets.pop(rank)
        del self.ranks[connection.fileno()]
        self.blocked.discard(rank)
        self.poll.unregister(connection)
        return connection

    def _close(self, rank: int) -> None:
        connection = self._part(rank)
        if self._held[rank]:
            with contextlib.suppress(OSError):  # its other end was first
                connection.shutdown(socket.SHUT_RDWR)  # which those that hold it see
            self._ended[rank] = connection, False
        else:
            connection.close()


def _holds_back(connection: Stream) -> bool:
    """Whether a record was read from the socket that has not been read whole from the connection."""
    return isinstance(connection, TlsStream) and connection.pending > 0
