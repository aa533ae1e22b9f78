"""Reaching the store of a secure rendezvous: what is tried again, and what is final."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from kits.contract.worldkit import free_port
from kits.tlskit import Files, authority
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from multiworld._net.stores.tcp_client import NotAStoreError, TcpClient
from multiworld._net.stores.tls_server import TlsStoreServer
from multiworld.run.nodes import secure_rendezvous

PATIENCE = 30.0


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """The authority of this process, which is in secure mode."""
    by = authority("job")
    for name, value in Files(tmp_path / "own", by).environment.items():
        monkeypatch.setenv(name, value)
    return by


class HangsUp:
    """An address that accepts and says nothing, as a proxy without a store; then nothing listens there."""

    def __init__(self, *, times):
        self.port = free_port()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._times = times
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        with self._listener, contextlib.suppress(OSError):  # its end
            for _ in range(self._times):
                with self._listener.accept()[0] as connection:
                    connection.settimeout(PATIENCE)
                    connection.shutdown(socket.SHUT_WR)  # closed with bytes unread, it would be a reset
                    while connection.recv(65536):
                        continue

    def over(self):
        self._thread.join(PATIENCE)

    def close(self):
        with contextlib.suppress(OSError):  # it is over
            self._listener.shutdown(socket.SHUT_RDWR)
        self.over()


def opened(port, parts):
    return secure_rendezvous._open_store("127.0.0.1", port, parts, serves=False, seconds=PATIENCE)


def test_a_store_behind_a_proxy_that_hangs_up_is_waited_for(tmp_path, ours):
    credentials = Files(tmp_path / "store", ours).credentials
    with contextlib.ExitStack() as parts:
        proxy = HangsUp(times=2)

        def serve():
            proxy.over()
            target = ("127.0.0.1", proxy.port)
            parts.callback(TlsStoreServer(socket.AF_INET, target, credentials=credentials).close)

        later = threading.Thread(target=serve)
        later.start()
        parts.callback(later.join, PATIENCE)
        parts.callback(proxy.close)
        store = opened(proxy.port, parts)
        store.set("a", "b")
        assert store.get("a") == b"b"


def test_an_address_that_hangs_up_is_told_as_that(ours):
    proxy = HangsUp(times=1)
    with contextlib.closing(proxy), pytest.raises(NotAStoreError, match="closed the connection in the TLS"):
        TcpClient.connect(socket.AF_INET, ("127.0.0.1", proxy.port), deadline=time.monotonic() + PATIENCE)


def test_a_store_of_another_authority_is_final(tmp_path, ours):
    other = Files(tmp_path / "other", authority("job")).credentials
    server = TlsStoreServer(socket.AF_INET, ("127.0.0.1", 0), credentials=other)
    with contextlib.ExitStack() as parts:
        parts.callback(server.close)
        with pytest.raises(RendezvousConnectionError, match="is refused"):
            opened(server.port, parts)
