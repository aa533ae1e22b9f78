"""The address of this host that the other nodes can reach."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from multiworld.run.errors import RunError

__all__ = ["reachable_address"]

_ELSEWHERE = "192.0.2.1"  # TEST-NET-1 (RFC 5737): stands for any other host; nothing is sent there


def reachable_address(endpoint: str, local_addr: str | None) -> str:
    """Return a numeric address of an interface of this host.

    Args:
        endpoint: "host:port" of the rendezvous; the interface of the route to it is taken.
        local_addr: address or name of this host from --local-addr, which is taken instead.

    Raises:
        RunError: `local_addr` is no address of this host.
    """
    if local_addr:
        for address in _resolved(local_addr):
            if _own(address):
                return address
        raise RunError(
            f"--local-addr {local_addr}",
            rule="It is an address, or the name of one, of an interface of this host",
            next_step="Give an address that `ip address` shows, and that the other nodes can reach",
        )
    host = _host_of(endpoint)
    for address in _resolved(host) if host else []:
        source = _towards(address)
        if source and (not _loopback(source) or _means_loopback(host)):
            return source
    # The endpoint's name resolves to this host's loopback (as /etc/hosts often has it), which the others
    # cannot reach. The interface of the default route is the best guess then.

    return _towards(_ELSEWHERE) or "127.0.0.1"


def _host_of(endpoint: str) -> str:
    host, found, port = endpoint.rpartition(":")
    bare = host if found and port.isdigit() else endpoint
    return bare.strip("[]")


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [
        str(to[0]).partition("%")[0] for *_, to in sorted(found, key=lambda each: each[0] != socket.AF_INET)
    ]


def _own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def _towards(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address, 9))  # UDP: nothing is sent, the kernel picks the interface
        return str(probe.getsockname()[0])
    return ""


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _means_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
