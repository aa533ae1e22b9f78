"""JSON objects, one a line, over a stream socket: what a rank and its test tell each other."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from typing import Any

__all__ = ["Lines", "Wire"]

_CHUNK = 1 << 16


class Lines:
    """Bytes in, objects out; an unfinished line waits for its rest."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the objects that ``data`` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole]


class Wire:
    """One end of a stream socket. Sending is safe from any thread; so is receiving, one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lines = Lines()
        self._sending = threading.Lock()
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send an object.

        Raises:
            OSError: nobody reads any more.
            TypeError: it has something JSON does not know.
        """
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._sock.sendall(data)

    def receive(self, timeout: float) -> list[dict[str, Any]]:
        """Return what came within so many seconds: [] if nothing did, or if the other end is gone (`ended`)."""
        deadline = time.monotonic() + timeout
        while not self.ended:
            poller = select.poll()
            poller.register(self._sock, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return []
            try:
                data = self._sock.recv(_CHUNK)
            except ConnectionResetError:
                data = b""
            if not data:
                self.ended = True
            elif got := self._lines.feed(data):
                return got
        return []

    def close(self) -> None:
        """Close this end."""
        self.ended = True
        self._sock.close()
