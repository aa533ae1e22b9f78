"""Kernel state of a TCP connection (TCP_INFO, Linux)."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import termios

from multiworld._core.liveness.detector import Probe

__all__ = ["probe"]

# struct tcp_info of linux/tcp.h: 8 single bytes, then 32-bit numbers; tcpi_last_ack_recv (milliseconds) is
# the thirteenth of them. What is unacknowledged is not taken from there: tcpi_unacked leaves out what could
# not even be sent, and with a link that is down, or a full queue below TCP, that is everything.
_LAST_ACK = struct.Struct("=56xI")


def probe(connection: socket.socket) -> Probe | None:
    """Return whether the other host acknowledges; None where the kernel does not say."""
    queued = array.array("i", [0])
    try:
        (last_ack,) = _LAST_ACK.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104))
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, queued)  # SIOCOUTQ of tcp(7)
    except (OSError, ValueError, AttributeError, struct.error):
        return None
    return Probe(queued[0] > 0, last_ack / 1000)
