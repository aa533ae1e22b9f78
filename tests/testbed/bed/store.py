"""A process that serves stores, as a program of one rank: any rank of a test can then be killed."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bed.rank import Rank

__all__ = ["serve"]

_DAY = 86400.0


def serve(me: Rank) -> None:
    """Open servers (``open``: count, port) and close them (``close``: ports) until the test ends this process."""
    servers: dict[int, object] = {}
    while True:
        asked = me.hear("do", timeout=_DAY)
        for port in asked.get("close", []):
            servers.pop(port, None)
        if not asked.get("open"):
            continue
        try:
            opened = dict(_server(asked.get("port", 0)) for _ in range(asked["open"]))
        except OSError as exc:
            me.event("opened", ports=[], trouble=exc.strerror or str(exc))
            continue
        ports = [*opened]
        servers |= opened
        del opened  # a server ends when nothing refers to it
        me.event("opened", ports=ports, trouble="")


def _server(port: int) -> tuple[int, object]:
    """Return a server's port and the server: bound here, to loopback alone (torch would listen everywhere)."""
    import torch.distributed as dist

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
        listening.listen(512)
        bound = listening.getsockname()[1]
        return bound, dist.TCPStore(
            "127.0.0.1", bound, None, is_master=True, wait_for_workers=False,
            master_listen_fd=listening.detach(), use_libuv=False,  # libuv takes no socket in some versions
        )  # fmt: skip
