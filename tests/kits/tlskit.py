"""Certificates for tests: an authority, and files of members."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from multiworld._net.tls.authority import Authority
from multiworld._net.tls.credentials import Credentials
from multiworld._net.tls.stream import TlsStream

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Files", "authority", "met"]

HOST = socket.gethostname()


def authority(job: str = "test") -> Authority:
    """Return a new one."""
    return Authority.create(job)


class Files:
    """A certificate of an authority with its key, as files in a folder."""

    def __init__(
        self,
        folder: Path,
        by: Authority,
        *,
        host: str = HOST,
        name: str = "member",
        addresses: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cert, self.key, self.ca = (folder / f"{each}.pem" for each in ("cert", "key", "ca"))
        self.ca.write_bytes(by.certificate)
        self.addresses = addresses
        self.replace(by, host=host, name=name)

    def replace(self, by: Authority, *, host: str = HOST, name: str = "member") -> None:
        """Write another certificate and key."""
        issued = by.issue(host, name, addresses=self.addresses)
        self.key.touch(mode=0o600)
        self.key.write_bytes(issued.key)
        self.cert.write_bytes(issued.certificate)

    @property
    def environment(self) -> dict[str, str]:
        """The variables for a process in secure mode."""
        return {"M8D_TLS_CERT": str(self.cert), "M8D_TLS_KEY": str(self.key), "M8D_TLS_CA": str(self.ca)}

    @property
    def credentials(self) -> Credentials:
        """Those of the files."""
        return Credentials(str(self.cert), str(self.key), str(self.ca))


def met(
    dials: socket.socket, accepts: socket.socket, credentials: Credentials
) -> tuple[TlsStream, TlsStream]:
    """Return the ends of a connection as streams, their handshake over."""
    ends = TlsStream(dials, credentials, server=False), TlsStream(accepts, credentials, server=True)
    dials.setblocking(False)
    accepts.setblocking(False)
    for _ in range(1000):
        for each in ends:
            if each.peer is None:
                with contextlib.suppress(BlockingIOError):
                    each.shake_hands()
        if all(each.peer is not None for each in ends):
            return ends
    raise AssertionError("the handshake does not come to its end")
