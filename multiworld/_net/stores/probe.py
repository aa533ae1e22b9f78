"""Probe: whether an address accepts TCP connections, by one that is closed at once."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import selectors
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from multiworld._core.membership.roster import Endpoint

__all__ = ["answers"]


def answers(endpoints: Iterable[Endpoint], within: float) -> Mapping[Endpoint, bool | None]:
    """Find which endpoints accept a TCP connection.

    The kernel accepts for a process as long as it exists, be it stopped or busy, and refuses for one that is
    gone.

    Args:
        endpoints: where to.
        within: seconds.

    Returns:
        For each endpoint True (accepted), False (refused) or None (no answer within the time, or no way
        there).
    """
    deadline = time.monotonic() + within
    found: dict[Endpoint, bool | None] = dict.fromkeys(endpoints)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for endpoint in found:
            # An invalid address is unreachable.
            with contextlib.suppress(OSError, ValueError, OverflowError):
                version = ipaddress.ip_address(endpoint.host).version  # no names: a lookup may take long
                family = socket.AF_INET6 if version == 6 else socket.AF_INET
                sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                sock.setblocking(False)
                code = sock.connect_ex((endpoint.host, endpoint.port))
                if code == errno.EINPROGRESS:
                    selector.register(sock, selectors.EVENT_WRITE, (endpoint, sock))
                else:
                    found[endpoint] = _answer(code, sock)
        while selector.get_map():
            left = deadline - time.monotonic()
            # One last look after the deadline: this process may have been stalled while answers arrived.
            for key, _ in selector.select(max(0.0, left)):
                endpoint, sock = key.data
                selector.unregister(sock)
                found[endpoint] = _answer(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), sock)
            if left <= 0:
                break
    return found


def _answer(code: int, sock: socket.socket) -> bool | None:
    if code == 0:
        # TCP may connect a socket to itself where the port is free.
        return bool(sock.getsockname() != sock.getpeername())
    return False if code == errno.ECONNREFUSED else None
