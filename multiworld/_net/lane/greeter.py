"""One lane connection while its handshake goes on."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
from typing import TYPE_CHECKING

from multiworld._core.lane.greeting import NONCE_SIZE, Greeting
from multiworld._net import peer_user
from multiworld._net.lane.connections import NOW
from multiworld._net.lane.memory import Proof
from multiworld._net.tls.session import RefusedError
from multiworld._net.tls.stream import Stream, TlsStream

if TYPE_CHECKING:
    from multiworld._core.membership.roster import Roster
    from multiworld._net.lane.memory import MemoryReader
    from multiworld._net.tls.credentials import Credentials

__all__ = ["Greeter"]


class Greeter:
    """Reads and writes a connection for its `Greeting`, without waiting, and not a byte more.

    In secure mode a TCP connection is TLS first, and at the other end of a Unix socket has to be a process of
    the same user: what passes there leaves the host's memory for none to read.

    Args:
        connection: connected or connecting; it stays the caller's.
        roster: the generation.
        dialed: rank of the member that was dialed; None if the connection was accepted.
        now: ``time.monotonic()`` seconds.
        credentials: in secure mode.

    Attributes:
        socket: the connection, TLS where that is due.
        active: when bytes came last.
        begun: `now`.
    """

    def __init__(
        self,
        connection: socket.socket,
        roster: Roster,
        dialed: int | None,
        now: float,
        credentials: Credentials | None = None,
    ) -> None:
        self.socket: Stream = connection
        self.dialed = dialed
        self.active = self.begun = now
        self._roster = roster
        self._local = connection if credentials is not None and connection.family == socket.AF_UNIX else None
        self._tls: TlsStream | None = None
        self._vouched = False  # the other end's certificate was compared with the roster
        if credentials is not None and self._local is None:
            # TLS's last message is followed at once by the greeting, which would wait for the other end to
            # acknowledge that message: 40 ms.
            with contextlib.suppress(OSError):  # it has ended already, which the handshake tells
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket = self._tls = TlsStream(connection, credentials, server=dialed is None)
        self._proof = Proof(peer_user.pid_of(connection))
        self._greeting = Greeting(roster, self._proof, secrets.token_bytes(NONCE_SIZE), dialed)

    @property
    def peer(self) -> int | None:
        """Rank of the other end, as `Greeting.peer`."""
        return self._greeting.peer

    @property
    def over(self) -> bool:
        """Whether the handshake has succeeded."""
        return self._greeting.over

    @property
    def reader(self) -> MemoryReader | None:
        """Of the other end's memory; None if it cannot be read. Once it is `over`."""
        return self._proof.reader if self._greeting.may_read else None

    @property
    def anonymous(self) -> bool:
        """Whether TLS does not know yet who is at the other end."""
        return self._tls is not None and self._tls.peer is None

    @property
    def events(self) -> int:
        """What the connection waits for."""
        if self._tls is not None and self._tls.peer is None:
            return self._tls.events
        return select.POLLIN | (select.POLLOUT if self._greeting.unsent else 0)

    def go_on(self, now: float) -> None:
        """Write and read as far as it goes.

        Raises:
            OSError: the connection cannot be made, has ended, or its other end is no member.
        """
        greeting = self._greeting
        with contextlib.suppress(BlockingIOError):  # that was all for now
            if self._tls is not None and self._tls.peer is None:
                self._tls.shake_hands()
            if self._local is not None:
                peer_user.check(self._local)
                self._local = None
            while not greeting.over:
                if unsent := greeting.unsent:
                    greeting.wrote(self.socket.send(unsent, NOW))
                    continue
                count = self.socket.recv_into(greeting.want(), 0, NOW)
                if not count:
                    raise ConnectionResetError("the connection was closed by its other end")
                self.active = now
                greeting.got(count)
                self._on_its_host()

    def _on_its_host(self) -> None:
        """Raise if a certificate is of another host than the member that it is shown by."""
        if self._vouched or self._tls is None or self._tls.peer is None or self.peer is None:
            return
        self._vouched = True
        host = self._roster.members[self.peer].hostname
        if not self._tls.peer.is_on(host):
            raise RefusedError(f"rank {self.peer} is on {host!r}, and its certificate is of {self._tls.peer}")
