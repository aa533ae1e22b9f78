"""Listener for the others' lane connections: a TCP socket, and a Unix socket for its own host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld._core.lane.greeting import VERSION
from multiworld._core.membership.roster import CHECKS, MEETS, LaneAddress
from multiworld._net.liveness.listeners import bound, is_numeric
from multiworld.errors import MultiworldError
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from typing_extensions import Self

    from multiworld._net.tls.stream import Stream

__all__ = ["Door", "end", "unix_name"]

_log = logger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


class Door:
    """The addresses of one member for one join. Before `listen` the kernel refuses who dials them.

    So strangers cannot fill the queue of connections while the members agree, which can take long.

    Args:
        host: numeric address of one interface of this host, where the others reach it.
        process: 32 hex digits, this process's own.
        version: of the protocol that this member offers.
        checks: whether it wants the calls of each collective to be compared.

    Attributes:
        address: what the others need to know. Its `place` is "" if there is no Unix socket.
        pid: of the process that opened the door; a forked child has only copies of its sockets.

    Raises:
        MultiworldError: `host` is no such address, or cannot be bound.
    """

    def __init__(self, host: str, process: str, version: int = VERSION, *, checks: bool = False) -> None:
        self.pid = os.getpid()
        self.sockets: tuple[socket.socket, ...] = ()
        tcp = _bind(host)
        port = tcp.getsockname()[1]
        unix = _bind_unix(unix_name(process, port)) if (place := _place()) else None
        # They begin to listen in this order: where TCP can be dialed, so can the Unix socket.
        self.sockets = (tcp,) if unix is None else (unix, tcp)
        self.address = LaneAddress(version, place if unix is not None else "", port, MEETS + CHECKS * checks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, backlog: int) -> None:
        """Let the others connect: so many may wait to be accepted.

        Raises:
            OSError: the door is closed.
        """
        for each in self.sockets:
            each.listen(backlog)

    def close(self) -> None:
        """Refuse all from now on; accepted connections stay. Idempotent.

        In a forked child: close its copies.
        """
        for each in self.sockets:
            end(each, self.pid)


def end(sock: Stream, pid: int) -> None:
    """End a socket that process `pid` has made, also for children that were forked with a copy of it.

    In such a child: close the copy, which leaves the parent's as it is. Idempotent.
    """
    if os.getpid() == pid:
        with contextlib.suppress(OSError):  # closed already, or not connected any more
            sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def unix_name(process: str, port: int) -> str:
    """Return the abstract address of the Unix socket beside a process's TCP port."""
    return f"\0m8d-lane-{process}-{port}"


def _bind(host: str) -> socket.socket:
    if not is_numeric(host):
        raise MultiworldError(
            f"the lane's address {host!r}",
            rule="It is the numeric address of one interface of this host",
            next_step="Give the address of the interface that leads to the other members",
        )
    try:
        return bound(host)
    except OSError as error:
        raise MultiworldError(
            f"the lane cannot be connected at {host}: {error.strerror or error}",
            rule="It is connected at an address of this host, at a port that the kernel chooses",
            next_step="Give an address that `ip address` lists here",
        ) from error


def _bind_unix(name: str) -> socket.socket | None:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        _log.debug("no Unix socket for the lane: %s", error)
        return None
    try:
        sock.setblocking(False)
        sock.bind(name)
    except OSError as error:
        # No abstract names here, or the name is taken: by the same port at another address of this process.
        _log.debug("no Unix socket for the lane: %s", error)
        sock.close()
        return None
    return sock


def _place() -> str:
    """Return a text that processes share which reach the same Unix sockets; "" if that cannot be told."""
    try:
        where = f"{_BOOT.read_text().strip()} {_NETWORK.stat().st_ino}"
    except OSError:
        return ""
    return hashlib.sha256(where.encode()).hexdigest()[:8]
