"""Detection of connections to a store's server that are not clients. Pure: no I/O, no clock.

torch's server (C++) closes no connection: one that sends nothing, or half a greeting, keeps a descriptor for
as long as it likes, and one that sends other bytes keeps memory too. A client sends a greeting at once (5
bytes: ``QueryType::VALIDATE`` and a magic number of ``TCPStoreBackend.hpp``); torch's since 2.5 and
multiworld's own then send a query that is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_UNPROVEN", "PATIENCE", "PATIENCE_BLOCKED", "AcceptedConnection", "ClientCheck"]

PATIENCE = 2.0
"""Seconds that a connection has to prove that it is a client's."""

PATIENCE_BLOCKED = 0.25
"""`PATIENCE` with a server that an incomplete greeting blocks for all clients."""

MAX_UNPROVEN = 64
"""Unproven connections at a time; the oldest are closed beyond that."""

_GREETING = 5  # bytes


@dataclass(frozen=True)
class AcceptedConnection:
    """An accepted connection, as the kernel describes it.

    Attributes:
        fd: its descriptor.
        inode: of the socket.
        received: number of bytes.
        answered: whether the server ever sent data.
    """

    fd: int
    inode: int
    received: int
    answered: bool


class ClientCheck:
    """Tells clients of one server from other connections.

    Args:
        answers: whether the server answers every client at once; otherwise a whole greeting is the proof.
        patience: seconds, see `PATIENCE`.
    """

    def __init__(self, *, answers: bool, patience: float = PATIENCE) -> None:
        self._answers = answers
        self._patience = patience
        self._clients: dict[int, int] = {}
        self._since: dict[tuple[int, int], float] = {}

    def is_client(self, fd: int, inode: int) -> bool:
        """Whether that connection has proved to be a client's."""
        return self._clients.get(fd) == inode

    def overdue(self, connections: list[AcceptedConnection], now: float) -> tuple[AcceptedConnection, ...]:
        """Return the connections to close.

        Args:
            connections: all open connections, without those of which `is_client` is true.
            now: monotonic seconds.
        """
        waiting: list[tuple[float, AcceptedConnection]] = []
        for each in connections:
            if each.answered or (not self._answers and each.received >= _GREETING):
                self._clients[each.fd] = each.inode
            else:
                waiting.append((self._since.get((each.fd, each.inode), now), each))
        self._since = {(each.fd, each.inode): since for since, each in waiting}
        waiting.sort(key=lambda entry: -entry[0])
        return tuple(
            each
            for place, (since, each) in enumerate(waiting)
            if now - since >= self._patience or place >= MAX_UNPROVEN
        )
