"""Listeners of the watchdog: one per address, held by worlds, paused without free descriptors."""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import threading
from typing import TYPE_CHECKING

from multiworld._core.membership.roster import Endpoint
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from multiworld._net.liveness.evidence import Helper

__all__ = ["Listener", "Listeners", "bound", "is_numeric", "resolve"]

_BACKLOG = 256


class Listener:
    """One listening socket and its number of holds."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.holds = 1


class Listeners:
    """The listeners of one process. Any thread, except `pause`, `resume`, `shut_down` and `abandon`.

    Args:
        selector: watches them; their data is a `Listener`.
        helper: answers questions about this process at the same addresses; None for none.
    """

    def __init__(self, selector: selectors.BaseSelector, helper: Helper | None) -> None:
        self._selector = selector
        self._helper = helper
        self._lock = threading.Lock()  # guards the table, never held during I/O
        self._by_host: dict[str, Listener] = {}

    def __len__(self) -> int:
        return len(self._by_host)

    def listen(self, host: str) -> Endpoint:
        """Listen at `host`, or hold the existing listener once more.

        Raises:
            MultiworldError: `host` is no numeric address of an interface here, or cannot be bound.
        """
        with self._lock:
            listener = self._by_host.get(host)
            if listener is None:
                listener = self._by_host[host] = Listener(_bind(host))
                self._selector.register(listener.socket, selectors.EVENT_READ, listener)
                if self._helper is not None:
                    self._helper.listen(Endpoint(host, listener.socket.getsockname()[1]))
            else:
                listener.holds += 1
            return Endpoint(host, listener.socket.getsockname()[1])

    def hold(self, endpoint: Endpoint) -> bool:
        """Hold the listener at `endpoint` once more; False where there is none."""
        with self._lock:
            listener = self._at(endpoint)
            if listener is None:
                return False
            listener.holds += 1
            return True

    def unlisten(self, endpoint: Endpoint) -> None:
        """Release one hold; the listener closes with the last one."""
        with self._lock:
            listener = self._at(endpoint)
            if listener is None:
                return
            listener.holds -= 1
            if listener.holds == 0:
                self._close(endpoint.host)

    def unlisten_all(self) -> None:
        """Close every listener, held or not."""
        with self._lock:
            for host in tuple(self._by_host):
                self._close(host)

    def pause(self) -> None:
        """Stop accepting: without free descriptors the listeners stay readable."""
        with self._lock:
            for listener in self._by_host.values():
                with contextlib.suppress(KeyError):  # closed, or paused already
                    self._selector.unregister(listener.socket)

    def resume(self) -> None:
        """Accept again."""
        with self._lock:
            for listener in self._by_host.values():
                with contextlib.suppress(KeyError):  # opened during the pause: registered already
                    self._selector.register(listener.socket, selectors.EVENT_READ, listener)

    def shut_down(self) -> None:
        """Close all without unregistering them: the selector is closed next."""
        with self._lock:
            for listener in self._by_host.values():
                listener.socket.close()
            self._by_host.clear()

    def abandon(self) -> None:
        """Close a forked child's copies. No lock: its holder may not exist in the child."""
        for listener in tuple(self._by_host.values()):
            listener.socket.close()

    def _at(self, endpoint: Endpoint) -> Listener | None:
        listener = self._by_host.get(endpoint.host)
        same = listener is not None and listener.socket.getsockname()[1] == endpoint.port
        return listener if same else None

    def _close(self, host: str) -> None:
        listener = self._by_host.pop(host)
        if self._helper is not None:
            self._helper.unlisten(Endpoint(host, listener.socket.getsockname()[1]))
        with contextlib.suppress(KeyError):  # accepting is paused: it is not registered
            self._selector.unregister(listener.socket)
        listener.socket.close()


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]:
    """Return family and socket address of a numeric host.

    Raises:
        OSError: `host` is not numeric.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, _, _, _, address = found[0]
    # typeshed has a third kind of address, which numeric hosts do not give.
    return family, address  # type: ignore[return-value]


def bound(host: str) -> socket.socket:
    """Return a non-blocking TCP socket at a numeric address, at a port that the kernel chooses.

    Raises:
        OSError: it cannot be bound there.
    """
    family, address = resolve(host, 0)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind(host: str) -> socket.socket:
    if not is_numeric(host):
        raise MultiworldError(
            f"the watchdog's address {host!r}",
            rule="It is the numeric address of one interface of this host",
            next_step="Give the address of the interface that leads to the store",
        )
    sock: socket.socket | None = None
    try:
        sock = bound(host)
        sock.listen(_BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise MultiworldError(
            f"the watchdog cannot listen at {host}: {error.strerror or error}",
            rule="It listens at an address of this host, at a port that the kernel chooses",
            next_step="Give an address that `ip address` lists here",
        ) from error
    return sock


def is_numeric(host: str) -> bool:
    """Whether `host` is the numeric address of one interface, not a name and not a wildcard."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False
