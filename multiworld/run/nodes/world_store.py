"""`WorldStore`, served by the launcher: members of planned worlds meet there."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from typing import TYPE_CHECKING

from multiworld._net.stores.address import StoreAddress
from multiworld._net.stores.held_worlds import key_of
from multiworld._net.stores.servers import Server, serve
from multiworld._net.stores.tcp_client import TcpClient
from multiworld.run.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WorldStore", "listening_targets"]

_ANSWER = 5.0
"""Seconds that the server has to answer this process; it takes milliseconds."""


class WorldStore:
    """A TCPStore on a port of the kernel's choice, until `close`; over TLS in a secure run.

    Without TLS a process that reaches it can do anything to the worlds that meet there: a numeric address is
    bound exactly. A name may resolve to other addresses elsewhere, so for one the store listens on all
    interfaces, as torch's own does.

    Args:
        host: name or numeric address of this host by which the workers of all nodes reach it.

    Attributes:
        address: "tcp://host:port", with `host` as given.

    Raises:
        RunError: the host does not resolve, or nothing can be served there.
    """

    def __init__(self, host: str) -> None:
        self._server: Server | None = None
        self._client: TcpClient | None = None
        try:
            self._server, self._at = _listen(host)
        except OSError as exc:
            raise RunError(
                f"the store for worlds cannot be served at {host!r}: {exc.strerror or exc}",
                rule="The host is a name or a numeric address of this machine",
                next_step="Give one, as in --local-addr 10.0.0.1",
            ) from exc
        self.address = str(StoreAddress("tcp", host=host, port=self._server.port))

    def hold(self, world: str, reason: str) -> None:
        """Let no world of this name begin here, unless members bring it; `reason`: what newcomers wait for.

        Raises:
            OSError: the server does not answer; as `release`.
        """

        def ask(client: TcpClient, deadline: float) -> None:
            client.set(key_of(world), reason.encode(), deadline=deadline)
            client.ping(deadline=deadline)

        self._call(ask)

    def release(self, world: str) -> None:
        """Let a world begin here that was held."""
        self._call(lambda client, deadline: client.delete(key_of(world), deadline=deadline))

    def _call(self, ask: Callable[[TcpClient, float], object]) -> None:
        deadline = time.monotonic() + _ANSWER
        if self._client is None:
            self._client = TcpClient.connect(*self._at, deadline=deadline)
        try:
            ask(self._client, deadline)
        except OSError:
            self._client.close()  # the next call makes another connection
            self._client = None
            raise

    def close(self) -> None:
        """End it. Active worlds go on; a join looks for the store again. Harmless when repeated."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
            self._server = None


def _listen(host: str) -> tuple[Server, tuple[int, tuple[str, int]]]:
    """Return the server, and the family and address where this process reaches it."""
    targets = listening_targets(host)
    for number, (family, address) in enumerate(targets, 1):
        try:
            server = _serve_anywhere(family, address)
        except OSError as exc:  # noqa: PERF203  (two addresses)
            # Behind NAT the public address is not an address of this host.
            if exc.errno != errno.EADDRNOTAVAIL or number == len(targets):
                raise
        else:
            return server, (family, (address, server.port))
    raise OSError(errno.EADDRNOTAVAIL, "it has no address")


def _serve_anywhere(family: int, address: str) -> Server:
    """Serve at a free port, reserved by a socket until the server listens: torch 2.6 needs its number."""
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind((address, 0))
        return serve(family, (address, held.getsockname()[1]))


def listening_targets(host: str) -> list[tuple[int, str]]:
    """Return the addresses to try to listen at, with their families."""
    everywhere = {int(socket.AF_INET): "0.0.0.0", int(socket.AF_INET6): "::"}  # noqa: S104  (see WorldStore)
    with contextlib.suppress(ValueError):  # raised for a name, which is resolved below
        family = int(socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET)
        return [(family, host), (family, everywhere[family])]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except UnicodeError as exc:
        raise OSError(errno.EINVAL, "no host can have that name") from exc
    resolved = {int(family): str(to[0]) for family, _, _, _, to in reversed(found)}
    if host == "localhost":
        everywhere = resolved
    return [(family, everywhere[family]) for family in sorted(resolved)]
