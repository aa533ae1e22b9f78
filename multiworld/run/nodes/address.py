"""The address of this host that the other nodes can reach."""

from __future__ import annotations

import contextlib
import ipaddress

from multiworld._net.host_address import ELSEWHERE, is_loopback, is_own, resolved, source_towards
from multiworld.run.errors import RunError

__all__ = ["reachable_address"]


def reachable_address(endpoint: str, local_addr: str | None) -> str:
    """Return a numeric address of an interface of this host.

    Args:
        endpoint: "host:port" of the rendezvous; the interface of the route to it is taken.
        local_addr: address or name of this host from --local-addr, which is taken instead.

    Raises:
        RunError: `local_addr` is no address of this host.
    """
    if local_addr:
        for address in _addresses(local_addr):
            if is_own(address):
                return address
        raise RunError(
            f"--local-addr {local_addr}",
            rule="It is an address, or the name of one, of an interface of this host",
            next_step="Give an address that `ip address` shows, and that the other nodes can reach",
        )
    host = _host_of(endpoint)
    for address in _addresses(host) if host else []:
        source = source_towards(address)
        if source and (not is_loopback(source) or _means_loopback(host)):
            return source
    # The endpoint's name resolves to this host's loopback (as /etc/hosts often has it), which the others
    # cannot reach. The interface of the default route is the best guess then.
    return source_towards(ELSEWHERE) or "127.0.0.1"


def _host_of(endpoint: str) -> str:
    host, found, port = endpoint.rpartition(":")
    bare = host if found and port.isdigit() else endpoint
    return bare.strip("[]")


def _addresses(host: str) -> list[str]:
    return [address.partition("%")[0] for address in resolved(host)]


def _means_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
