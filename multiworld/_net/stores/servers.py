"""Serving a store: by torch's TCPStore server, or over TLS where this process is in secure mode.

``serve(family, target)`` is what other packages call; `TcpClient.connect` and `open_store` are its other end,
and take TLS by the settings, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from multiworld._net.tls.credentials import current

if TYPE_CHECKING:
    from multiworld._net.tls.credentials import Credentials

__all__ = ["Server", "serve", "serve_as"]


class Server(Protocol):
    """A server at one address; see `StoreServer` and `TlsStoreServer`."""

    port: int
    thread: int

    def close(self) -> None:
        """Stop it and free the port. Idempotent."""


def serve(family: int, target: tuple[str, int], *, timeout: float = 30.0) -> Server:
    """Serve a store, over TLS if the settings M8D_TLS_* say so.

    Args:
        family: of the address.
        target: numeric host, and port.
        timeout: seconds that torch may take to connect to its own server.

    Raises:
        OSError: it cannot listen there.
        RuntimeError: torch's.
        MultiworldError: of `current`.
    """
    return serve_as(current(), family, target, timeout=timeout)


def serve_as(
    credentials: Credentials | None, family: int, target: tuple[str, int], *, timeout: float = 30.0
) -> Server:
    """Serve a store as `serve`: over TLS with `credentials`, without where they are None."""
    if credentials is not None:
        from multiworld._net.stores.tls_server import TlsStoreServer  # noqa: PLC0415  (only in secure mode)

        return TlsStoreServer(family, target, credentials=credentials)
    from multiworld._net.stores.server import StoreServer  # noqa: PLC0415  (loads torch)

    return StoreServer(family, target, timeout=timeout)
