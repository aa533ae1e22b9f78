"""A child that is forked while the other thread makes a TLS connection: it closes its copies of all of them."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kits.tlskit import Files, authority

from multiworld._core.membership.roster import Endpoint
from multiworld._net.liveness.sockets import Sockets
from multiworld._net.stores.listening import listening
from multiworld._net.stores.tls_server import _Serving
from multiworld._net.tls.credentials import Credentials

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 30.0


def own_sockets() -> set[str]:
    """The descriptors of this process that are sockets."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself
            if str(each.readlink()).startswith("socket:"):
                found.add(each.name)
    return found


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Files(tmp_path, authority()).credentials


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None], set[str]], list[int]]:
    """Has a child forked whenever a context is asked for, which may read files; returns what they have left."""

    def forking(abandon: Callable[[], None], others: set[str]) -> list[int]:
        left: list[int] = []
        context = Credentials.context

        def forked(self: Credentials, *, server: bool) -> object:
            child = os.fork()
            if not child:
                abandon()
                os._exit(len(own_sockets() - others))
            left.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return context(self, server=server)

        monkeypatch.setattr(Credentials, "context", forked)
        return left

    return forking


def test_the_watchdog_accepts(credentials, forks):
    others = own_sockets()
    sockets = Sockets(iter(range(9)).__next__, credentials=credentials)
    at = sockets.listeners.listen("127.0.0.1")
    with contextlib.closing(socket.create_connection((at.host, at.port))) as client:
        left = forks(sockets.abandon, {*others, str(client.fileno())})
        while not sockets.open:
            sockets.wait(PATIENCE)
        sockets.shut_down()
    assert left
    assert not any(left)


def test_the_watchdog_dials(credentials, forks):
    others = own_sockets()
    sockets = Sockets(iter(range(9)).__next__, credentials=credentials)
    at = sockets.listeners.listen("127.0.0.1")
    left = forks(sockets.abandon, others)
    sockets.dial(100, Endpoint(at.host, at.port))
    sockets.shut_down()
    assert left == [0]


def test_a_store_accepts(credentials, forks):
    others = own_sockets()
    serving = _Serving(listening(socket.AF_INET, ("127.0.0.1", 0)), credentials)
    with contextlib.closing(socket.create_connection(serving.listener.getsockname())) as client:
        client.sendall(b"\x16")  # one that says nothing is not accepted
        left = forks(serving.abandon, {*others, str(client.fileno())})
        while not serving._connections:
            serving._turn()
        serving.abandon()
    assert left
    assert not any(left)
