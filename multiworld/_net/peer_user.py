"""Peer credentials of a unix socket: only a process of this user, or root's, is spoken with."""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["check", "pid_of", "refusal"]

_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7)


def refusal(sock: socket.socket) -> str | None:
    """Return why this process does not speak with the other end of a connected unix socket; None if it does.

    For the end that accepted, the other one is who connected; for the end that connected, who listens.
    """
    pid, uid, _ = _credentials(sock)
    if uid in {os.getuid(), 0}:
        return None
    return f"process {pid} of user {uid} is at the other end, and only user {os.getuid()} or root may be"


def pid_of(sock: socket.socket) -> int | None:
    """Return the pid of the process at the other end, as the kernel says it.

    None if it is in a pid namespace that this process does not see, and for other sockets.
    """
    if sock.family != socket.AF_UNIX:
        return None
    return _credentials(sock)[0] or None


def check(sock: socket.socket) -> None:
    """Check the other end.

    Raises:
        PermissionError: it is another user's process.
    """
    if (why := refusal(sock)) is not None:
        raise PermissionError(why)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return pid, user and group of the other end."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(packed)
    return pid, uid, gid
