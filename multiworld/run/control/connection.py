"""`Client`: one connection of the control socket, and what is known of its other end."""

from __future__ import annotations

import socket
import time

from multiworld._net.launcher_connection import MAX_LINE, Lines

__all__ = ["MOST_LOOKED", "Client"]

_MOST_UNREAD = 4 << 20
"""Bytes that may wait for a client that does not read; with more it is cut off."""
MOST_LOOKED = 64 << 20
"""The same for one that gets the answers of many workers, each up to 1 MiB."""


class Client:
    """One connection.

    Args:
        sock: accepted.

    Attributes:
        lines, out: bytes that came and are no whole line yet; that are to be sent.
        most: bytes that may wait in `out`.
        longest: bytes of a line to it.
        since: ``time.monotonic()`` seconds of its accept.
        said: whether it has said hello.
        rank, attempt: of a worker; None of another client.
        told: the store's address, as it was told last.
        retires: whether it was told that it retires.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lines = Lines()
        self.out = bytearray()
        self.most = _MOST_UNREAD
        self.longest = MAX_LINE
        self.since = time.monotonic()
        self.said = False
        self.rank: int | None = None
        self.attempt = 0
        self.told = ""
        self.retires = False

    def waits(self) -> bool:
        """Whether its other end is still open. From any thread."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:  # it was cut off
            return False

    def __str__(self) -> str:
        return "a client" if self.rank is None else f"worker {self.rank}"
