"""Numeric addresses of a store's host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from multiworld._net import host_address
from multiworld.errors import StoreUnreachableError

if TYPE_CHECKING:
    from multiworld._net.stores.address import StoreAddress

__all__ = ["resolved_targets"]


class _Question:
    """One question to the name server, in a thread that goes on when none waits for it any more."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._answered = threading.Event()
        self._answer: Any = TimeoutError("the name server does not answer")

    def begin(self) -> None:
        """Ask, in a thread."""
        try:
            threading.Thread(target=self._ask, name="m8d-resolve", daemon=True).start()
        except RuntimeError as error:  # the host has no thread left, perhaps for a moment
            self._answer = socket.gaierror(socket.EAI_AGAIN, str(error))
            self.end()

    def answer(self, deadline: float) -> Any:
        """Return what `socket.getaddrinfo` returns, or the OSError for which there is no answer."""
        self._answered.wait(max(0.001, deadline - time.monotonic()))
        return self._answer

    def end(self) -> None:
        """Have the next caller ask anew, and those that wait go on."""
        if _under_way.get(self._to) is self:
            del _under_way[self._to]
        self._answered.set()

    def _ask(self) -> None:
        try:
            self._answer = socket.getaddrinfo(*self._to, type=socket.SOCK_STREAM)
        except OSError as error:
            self._answer = error
        except UnicodeError:  # an empty label, or one that is longer than 63 bytes
            self._answer = socket.gaierror(socket.EAI_NONAME, "no host can have that name")
        finally:
            self.end()


_under_way: dict[tuple[str, int], _Question] = {}
"""One of each name: while a name server is silent, those who ask again wait for the same thread."""

os.register_at_fork(after_in_child=_under_way.clear)  # the threads are the parent's


def _asked(host: str, port: int) -> _Question:
    """Return the question for a name that is under way, or a new one."""
    new = _Question(host, port)
    try:
        question = _under_way.setdefault((host, port), new)
        if question is new:
            new.begin()
    except BaseException:  # of a signal's handler; perhaps no thread would ever answer it
        new.end()
        raise
    return question


def resolved_targets(
    address: StoreAddress, *, world: str, deadline: float
) -> list[tuple[int, tuple[str, int]]]:
    """Return the host's numeric addresses, each once, with their family, within the deadline."""
    with contextlib.suppress(ValueError):  # a name
        version = ipaddress.ip_address(address.host).version
        return [(socket.AF_INET6 if version == 6 else socket.AF_INET, (address.host, address.port))]
    found = _asked(address.host, address.port).answer(deadline)
    if isinstance(found, OSError):
        raise StoreUnreachableError(
            world,
            f"{address}: {found.strerror or found}",
            rule="The host is a name that resolves here, or a numeric address",
            next_step="Check the name, or give the numeric address",
        ) from found
    targets = list(dict.fromkeys((int(family), (str(to[0]), int(to[1]))) for family, _, _, _, to in found))
    if address.host != "localhost" and all(host_address.is_loopback(target[0]) for _, target in targets):
        # A host's own name, which /etc/hosts often gives to loopback (127.0.1.1); the others resolve it
        # otherwise.
        outside = (host_address.outward(), address.port)
        targets.insert(0, (int(socket.AF_INET6 if ":" in outside[0] else socket.AF_INET), outside))
    return list(dict.fromkeys(targets))
