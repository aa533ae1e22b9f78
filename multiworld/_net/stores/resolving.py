"""Numeric addresses of a store's host."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from multiworld._net import host_address
from multiworld.errors import StoreUnreachableError

if TYPE_CHECKING:
    from multiworld._net.stores.address import StoreAddress

__all__ = ["resolved_targets"]


def resolved_targets(
    address: StoreAddress, *, world: str, deadline: float
) -> list[tuple[int, tuple[str, int]]]:
    """Return the host's numeric addresses, each once, with their family, within the deadline."""
    with contextlib.suppress(ValueError):  # a name
        version = ipaddress.ip_address(address.host).version
        return [(socket.AF_INET6 if version == 6 else socket.AF_INET, (address.host, address.port))]
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
        except OSError as error:
            answers.put(error)
        except UnicodeError:  # an empty label, or one that is longer than 63 bytes
            answers.put(socket.gaierror(socket.EAI_NONAME, "no host can have that name"))

    threading.Thread(target=ask, name="m8d-resolve", daemon=True).start()
    try:
        found = answers.get(timeout=max(0.001, deadline - time.monotonic()))
    except queue.Empty:
        found = TimeoutError("the name server does not answer")
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
