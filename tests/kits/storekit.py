"""A TCPStore server for tests, on this host's loopback address alone."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["local_server"]

_LIBUV_TAKES_A_SOCKET = (2, 9)  # torch: 2.4 and 2.6 refuse one


def local_server(port: int = 0, *, seconds: float = 300.0) -> dist.TCPStore:
    """Serve a store on 127.0.0.1.

    torch's server asks for the name of each client. For an IPv4 socket it is found in /etc/hosts. For the IPv6
    socket that torch opens itself (its clients are "::ffff:127.0.0.1") the name server is asked: one that limits
    requests answers the client after 5 s.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(512)
        return dist.TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=listening.detach(),
            use_libuv=version >= _LIBUV_TAKES_A_SOCKET,
        )
