"""Addresses that the page can be served at. Pure."""

from __future__ import annotations

from multiworld.errors import MultiworldError

__all__ = ["DEFAULT", "host_and_port"]

DEFAULT = "127.0.0.1:0"


def host_and_port(address: str) -> tuple[str, int]:
    """Read "HOST:PORT"; an IPv6 address may be in brackets.

    Raises:
        MultiworldError: it is none.
    """
    host, colon, text = address.rpartition(":")
    host = host.strip("[]")
    if not (colon and host and text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise MultiworldError(
            f"{address!r} to serve the page at",
            rule="It is HOST:PORT; port 0 takes a free one",
            next_step="As in 127.0.0.1:8080",
        )
    return host, int(text)
