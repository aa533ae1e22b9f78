"""Ports of the loopback for programs that must know theirs beforehand."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free port of the loopback, kept from everybody who does not name it.

    The store's port must be known to all members beforehand: that is pymultiworld's API. A socket that is
    bound but does not listen lets only those bind the port who ask for exactly this one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holding.bind(("127.0.0.1", 0))
        yield int(holding.getsockname()[1])
