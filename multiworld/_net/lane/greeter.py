"""One lane connection while its handshake goes on."""

from __future__ import annotations

import contextlib
import secrets
import select
from typing import TYPE_CHECKING

from multiworld._core.lane.greeting import NONCE_SIZE, Greeting
from multiworld._net.lane.connections import NOW
from multiworld._net.lane.memory import Proof

if TYPE_CHECKING:
    import socket

    from multiworld._core.membership.roster import Roster
    from multiworld._net.lane.memory import MemoryReader

__all__ = ["Greeter"]


class Greeter:
    """Reads and writes a connection for its `Greeting`, without waiting, and not a byte more.

    Args:
        connection: connected or connecting; it stays the caller's.
        roster: the generation.
        dialed: rank of the member that was dialed; None if the connection was accepted.
        now: ``time.monotonic()`` seconds.

    Attributes:
        active: when bytes came last.
    """

    def __init__(self, connection: socket.socket, roster: Roster, dialed: int | None, now: float) -> None:
        self.socket = connection
        self.dialed = dialed
        self.active = now
        self._proof = Proof()
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
    def events(self) -> int:
        """What the connection waits for."""
        return select.POLLIN | (select.POLLOUT if self._greeting.unsent else 0)

    def go_on(self, now: float) -> None:
        """Write and read as far as it goes.

        Raises:
            OSError: the connection cannot be made, has ended, or its other end is no member.
        """
        greeting = self._greeting
        with contextlib.suppress(BlockingIOError):  # that was all for now
            while not greeting.over:
                if unsent := greeting.unsent:
                    greeting.wrote(self.socket.send(unsent, NOW))
                    continue
                count = self.socket.recv_into(greeting.want(), 0, NOW)
                if not count:
                    raise ConnectionResetError("the connection was closed by its other end")
                self.active = now
                greeting.got(count)
