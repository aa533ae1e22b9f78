"""Packet filters on gloo's listeners, which accept only members of a group that is being built.

gloo's listener lives as long as its device, and ends the process when it cannot accept
(`_core/packet_filter.py`). It is needed only from a group's first address in the store until its constructor
returns: then every pair is connected. Before and after that the filter drops all packets; in between it
accepts connections that send the number of one of the group's pairs. Where the system has no such filters
(SO_ATTACH_FILTER) the listeners stay open.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
from typing import TYPE_CHECKING

from multiworld._c10d.gloo import sockets
from multiworld._core.packet_filter import DROP_ALL, NUMBER_SIZE, encode, pair_numbers
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiworld._core.packet_filter import Instruction

__all__ = ["Gate", "address_of", "deafen"]

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER of asm-generic/socket.h
_UNUSUAL = {"sparc64": (0x1A, 0x1B), "parisc64": (0x401A, 0x401B), "parisc": (0x401A, 0x401B)}

_log = logger(__name__)
_known: dict[sockets.Address, sockets.TcpSocket] = {}
_lock = threading.Lock()


class Gate:
    """The listeners that a group publishes, while it is being built.

    Args:
        size: members of the group.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._own: set[sockets.Address] = set()

    def open(self, value: bytes) -> None:
        """Accept the members that connect to the address about to be published; ignore other values."""
        address = address_of(value)
        if address is None:
            return
        numbers = [
            int.from_bytes(value[at : at + NUMBER_SIZE], sys.byteorder, signed=True)
            for at in range(len(value) - NUMBER_SIZE * self._size, len(value), NUMBER_SIZE)
        ]
        self._own.add(address)
        try:
            program: tuple[Instruction, ...] | None = pair_numbers(min(numbers), max(numbers), sys.byteorder)
        except ValueError:
            program = None  # a gloo that numbers its pairs otherwise: accept all connections
        _filter_listener(address, program)

    def relieve(self) -> None:
        """Remove the filter from the accepted connections."""
        if self._own:
            _unfilter(sockets.accepted(self._own))

    def close(self, links: Iterable[sockets.TcpSocket] = ()) -> None:
        """Drop all packets from now on. Idempotent.

        Args:
            links: the group's connections, whose filter is removed.
        """
        for address in self._own:
            _filter_listener(address, DROP_ALL)
        _unfilter(each for each in links if each.local in self._own)
        self._own = set()


def address_of(value: bytes) -> sockets.Address | None:
    """Return the listener that a value of the store publishes; None where it is something else."""
    try:
        return sockets.parse_address(value)
    except (struct.error, ValueError):
        return None


def deafen(address: sockets.Address) -> bool:
    """Drop all packets at this process's listener at `address`; False where the system cannot do that."""
    return _filter_listener(address, DROP_ALL)


def _filter_listener(address: sockets.Address, program: tuple[Instruction, ...] | None) -> bool:
    with _lock:
        link = _known.get(address)
    if link is None or not sockets.still_open((link,)):
        link = sockets.listener(address)
        if link is None:
            return False
        with _lock:
            _known[address] = link
    done = sockets.apply(link, lambda sock: _set(sock, program))
    if not done:
        _log.debug("gloo's listener at %s port %d cannot be guarded here", *address)
    return done


def _unfilter(links: Iterable[sockets.TcpSocket]) -> None:
    for link in links:
        sockets.apply(link, lambda sock: _set(sock, None))


def _set(sock: socket.socket, program: tuple[Instruction, ...] | None) -> None:
    attach, detach = _UNUSUAL.get(os.uname().machine, (_ATTACH, _DETACH))
    if program is None:
        sock.setsockopt(socket.SOL_SOCKET, detach, 0)
        return
    octets = encode(program)
    held = ctypes.create_string_buffer(octets, len(octets))
    # struct sock_fprog of linux/filter.h
    sock.setsockopt(socket.SOL_SOCKET, attach, struct.pack("@HP", len(program), ctypes.addressof(held)))


def _forked() -> None:
    global _lock  # noqa: PLW0603  (a thread of the parent may have held it)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
