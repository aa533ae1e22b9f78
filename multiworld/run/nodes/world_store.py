"""`WorldStore`, served by the launcher: members of planned worlds meet there."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from multiworld._net.stores.address import StoreAddress
from multiworld._net.stores.server import StoreServer
from multiworld.run.errors import RunError

__all__ = ["WorldStore"]


class WorldStore:
    """A TCPStore on a port of the kernel's choice, until `close`.

    A process that reaches it can do anything to the worlds that meet there: a numeric address is bound
    exactly. A name may resolve to other addresses elsewhere, so for one the store listens on all interfaces,
    as torch's own does.

    Args:
        host: name or numeric address of this host by which the workers of all nodes reach it.

    Attributes:
        address: "tcp://host:port", with `host` as given.

    Raises:
        RunError: the host does not resolve, or nothing can be served there.
    """

    def __init__(self, host: str) -> None:
        self._server: StoreServer | None = None
        try:
            self._server = _listen(host)
        except OSError as exc:
            raise RunError(
                f"the store for worlds cannot be served at {host!r}: {exc.strerror or exc}",
                rule="The host is a name or a numeric address of this machine",
                next_step="Give one, as in --local-addr 10.0.0.1",
            ) from exc
        self.address = str(StoreAddress("tcp", host=host, port=self._server.port))

    def close(self) -> None:
        """End it. Active worlds go on; a join looks for the store again. Harmless when repeated."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _listen(host: str) -> StoreServer:
    targets = _targets(host)
    for number, (family, address) in enumerate(targets, 1):
        try:
            return _serve_anywhere(family, address)
        except OSError as exc:  # noqa: PERF203  (two addresses)
            # Behind NAT the public address is not an address of this host.
            if exc.errno != errno.EADDRNOTAVAIL or number == len(targets):
                raise
    raise OSError(errno.EADDRNOTAVAIL, "it has no address")


def _serve_anywhere(family: int, address: str) -> StoreServer:
    """Serve at a free port, reserved by a socket until the server listens: torch 2.6 needs its number."""
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind((address, 0))
        return StoreServer(family, (address, held.getsockname()[1]))


def _targets(host: str) -> list[tuple[int, str]]:
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
