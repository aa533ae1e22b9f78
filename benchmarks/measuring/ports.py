"""Ports of the loopback for programs that must know theirs beforehand."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measuring.part import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRIES = 20


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free port of the loopback, kept from everybody who does not name it.

    The store's port must be known to all members beforehand: that is pymultiworld's API. A socket that is
    bound but does not listen lets only those bind the port who ask for exactly this one. It is one of
    `unasked_ports`, so the kernel gives it to no connection: one from another address of this machine would
    keep it from a store that listens at every address, as torch's does.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holding:
        for port in unasked_ports(_TRIES):
            # Another program may have bound it, and not listen.
            with contextlib.suppress(OSError):
                holding.bind(("127.0.0.1", port))
                break
        else:
            raise Unavailable(f"each of {_TRIES} ports of the loopback is held by another program")
        # Only now: with it, a port that is held already could have been bound once more.
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield port


def unasked_ports(count: int) -> list[int]:
    """So many free ports, none of those that the kernel may give to a program that binds to port 0."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    free = range(min(15000, max(1024, low - 5000)), low) if low > 1024 + count else range(high + 1, 65536)
    if len(free) < count:
        raise Unavailable(f"net.ipv4.ip_local_port_range is {low} {high}: no port is left beside it")
    found: list[int] = []
    while len(found) < count:
        port = random.choice(free)  # noqa: S311  (nothing secret)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) and port not in found:
                found.append(port)
    return found
