"""Processes connected to a server of this process, by the kernel's table of connections.

A TCPStore server does not say who is connected to it, and it must not end while another process's worlds meet
there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld._net import procfs

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

__all__ = ["callers", "others"]

_ESTABLISHED = "01"
_TABLES = ("tcp", "tcp6")
_MAPPED = ("0000000000000000FFFF0000", "00000000000000000000FFFF")
"""Prefix of an IPv4-mapped IPv6 address, in words of the machine's byte order."""


def callers(table: Iterable[str], port: int, own: Container[int]) -> int:
    """Count the connections of other processes to a server of this one.

    Args:
        table: lines of ``/proc/net/tcp`` and ``tcp6``, one after the other (proc_pid_net(5)). A busy host
            has tens of thousands, nearly all of connections that have ended: they are not kept.
        port: that the server listens at.
        own: inodes of this process's sockets.
    """
    accepted: list[tuple[str, str]] = []
    ours: set[tuple[str, str]] = set()
    for line in table:
        if f" {_ESTABLISHED} " not in line:
            continue
        row = line.split()
        if len(row) < 10 or row[3] != _ESTABLISHED or int(row[9]) not in own:
            continue
        local, remote = _plain(row[1]), _plain(row[2])
        if int(local.rpartition(":")[2], 16) == port:
            accepted.append((local, remote))
        else:
            ours.add((remote, local))  # the row of its other end
    return sum(each not in ours for each in accepted)


def others(port: int, server: int = 0) -> bool | None:
    """Whether another process is connected to this process's server at `port`; None where unknown.

    Args:
        port: of the server.
        server: number of the server's thread, which may have a table of descriptors of its own; 0: it has
            none.
    """
    try:
        own = _sockets("/proc/self/fd")
        if server:
            own |= _sockets(f"/proc/self/task/{server}/fd")
        with contextlib.ExitStack() as stack:
            paths = [Path("/proc/thread-self/net", name) for name in _TABLES]
            # Without IPv6 there is only one table.
            tables = [stack.enter_context(each.open(encoding="ascii")) for each in paths if each.exists()]
            return callers(itertools.chain(*tables), port, own) > 0 if tables else None
    except (OSError, ValueError):
        return None


def _plain(address: str) -> str:
    """Return an IPv4-mapped address as IPv4: torch's clients reach an IPv4 server from an IPv6 socket."""
    for prefix in _MAPPED:
        address = address.removeprefix(prefix)
    return address


def _sockets(table: str) -> set[int]:
    """Return the inodes of the sockets among a process's descriptors."""
    own = set()
    for name in procfs.names(table):
        try:
            target = os.readlink(f"{table}/{name}")  # noqa: PTH115  (a Path for each of up to a million descriptors)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            own.add(int(target[8:-1]))
    return own
