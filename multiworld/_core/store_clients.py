"""Which connections to a store's server are strangers'. Pure: descriptors and times are arguments.

The server (torch's, in C++) drops no one: who connects and says nothing, or half a word, keeps a descriptor for as long
as it likes, and what says something else than the protocol keeps memory too. A client says at once that it speaks the
protocol (5 bytes: ``QueryType::VALIDATE`` and a magic number of ``TCPStoreBackend.hpp``), and torch's since 2.5 and
multiworld's own then ask something that is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IMPATIENCE", "MOST", "PATIENCE", "Visit", "Visitors"]

PATIENCE = 2.0
"""Seconds that a connection may take to show that it is a client's."""

IMPATIENCE = 0.25
"""The same with a server that waits for the rest of a greeting, and serves nobody meanwhile."""

MOST = 64
"""Connections that may be waiting to show it at a time; the oldest make room."""

_GREETING = 5  # bytes


@dataclass(frozen=True)
class Visit:
    """What the kernel knows of a connection that the server accepted.

    Attributes:
        fd: its descriptor.
        inode: of the socket.
        received: bytes.
        answered: whether the server ever sent something.
    """

    fd: int
    inode: int
    received: int
    answered: bool


class Visitors:
    """The connections of one server.

    Args:
        answers: whether every client is answered at once; else it is enough to have said the greeting.
        patience: seconds, see `PATIENCE`.
    """

    def __init__(self, *, answers: bool, patience: float = PATIENCE) -> None:
        self._answers = answers
        self._patience = patience
        self._clients: dict[int, int] = {}
        self._since: dict[tuple[int, int], float] = {}

    def known(self, fd: int, inode: int) -> bool:
        """Whether that is a client: then nothing need be asked of it."""
        return self._clients.get(fd) == inode

    def look(self, visits: list[Visit], now: float) -> tuple[Visit, ...]:
        """Return those to hang up on.

        Args:
            visits: all present connections but those that are `known`.
            now: monotonic seconds.
        """
        waiting: list[tuple[float, Visit]] = []
        for each in visits:
            if each.answered or (not self._answers and each.received >= _GREETING):
                self._clients[each.fd] = each.inode
            else:
                waiting.append((self._since.get((each.fd, each.inode), now), each))
        self._since = {(each.fd, each.inode): since for since, each in waiting}
        waiting.sort(key=lambda entry: -entry[0])
        return tuple(
            each
            for place, (since, each) in enumerate(waiting)
            if now - since >= self._patience or place >= MOST
        )
