"""Addresses that a process is told to serve people and programs at: the page, the numbers. Pure."""

from __future__ import annotations

import ipaddress

from multiworld.errors import MultiworldError

__all__ = ["DEFAULT", "host_and_port", "is_loopback"]

DEFAULT = "127.0.0.1:0"


def host_and_port(address: str) -> tuple[str, int]:
    """Read "HOST:PORT"; an IPv6 address is in brackets.

    Raises:
        MultiworldError: it is none.
    """
    host, _, text = address.rpartition(":")
    bracketed = host[:1] == "[" and host[-1:] == "]"
    host = host[1:-1] if bracketed else host
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not host or not 0 <= port < 1 << 16 or (":" in host) is not bracketed:
        raise MultiworldError(
            f"{address!r} to serve at",
            rule="It is HOST:PORT, with an IPv6 address in brackets; port 0 takes a free one",
            next_step="As in 127.0.0.1:8080, [::1]:8080, 0.0.0.0:0",
        )
    return host, port


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a listener at that address."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
