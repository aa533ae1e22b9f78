"""Closing connections in good order: the other end can read all that was written to them.

TCP drops what is still on its way to the other end when a socket is closed that holds unread bytes, or gets
more of them afterwards. What has arrived there stays readable. So a connection is closed once nothing is on
its way any more; where something is, one thread sees to that.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiworld._net.tls.stream import Stream

__all__ = ["LINGER", "close", "say_goodbye"]

LINGER = 5.0
"""Seconds at most that the other end has to take what was written. One that reads takes milliseconds."""

_LOOK_EVERY = 0.01  # seconds: nothing tells when the last byte was taken


def say_goodbye(connection: Stream) -> bool:
    """Tell the other end that nothing more comes; returns whether bytes are still on their way there."""
    on_their_way = _on_their_way(connection)  # before the goodbye, which counts as a byte
    with contextlib.suppress(OSError):  # its other end was first
        connection.shutdown(socket.SHUT_WR)
    return on_their_way


def close(connections: Iterable[tuple[Stream, bool]]) -> None:
    """Close connections, with what `say_goodbye` returned for each; never waits.

    Those on which bytes are on their way are closed within `LINGER` seconds by a thread; at once where the
    host has no thread left.
    """
    left: dict[int, Stream] = {}
    for connection, on_their_way in connections:
        if on_their_way:
            left[connection.fileno()] = connection
        else:
            connection.close()
    if left:
        until = time.monotonic() + LINGER
        try:
            threading.Thread(target=_linger, args=(left, until), daemon=True, name="m8d-linger").start()
        except RuntimeError:  # the host has no thread left; what is on its way may be lost
            for connection in left.values():
                connection.close()


def _linger(left: dict[int, Stream], until: float) -> None:
    poll = select.poll()
    for fd in left:
        poll.register(fd, 0)  # the end of a connection is told all the same
    while left and time.monotonic() < until:
        ended = {fd for fd, _ in poll.poll(_LOOK_EVERY * 1000)}
        for fd, connection in list(left.items()):
            if fd in ended or not _on_their_way(connection):
                poll.unregister(fd)
                del left[fd]
                connection.close()
    for connection in left.values():
        connection.close()


def _on_their_way(connection: Stream) -> bool:
    """Whether the system of the other end has not confirmed all bytes that were written."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False  # within a host they are there at once
    try:
        size: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    except OSError:
        return False
    return size > 0
