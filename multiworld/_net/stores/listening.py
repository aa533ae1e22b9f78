"""The socket that a store's server listens at, of either kind of server."""

from __future__ import annotations

import socket

__all__ = ["listening"]

_DEFER = 60  # seconds that the kernel holds a silent connection back


def listening(family: int, target: tuple[str, int]) -> socket.socket:
    """Return a socket that listens at exactly one address.

    Accepted sockets inherit its options (Linux): connections to hosts that are gone end after a minute.

    Args:
        family: of the address.
        target: numeric host, and port.

    Raises:
        OSError: it cannot listen there.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER)
        sock.bind(target)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock
