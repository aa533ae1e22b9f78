"""Store addresses: text and parts. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from dataclasses import dataclass

from multiworld.errors import InvalidJoinError

__all__ = ["STORE_RULE", "StoreAddress", "is_list", "list_text", "without_login"]

STORE_RULE = (
    'A store is "tcp://host:port", "tcp://host:port,host:port,...", "etcd://host:port,.../prefix", '
    '"file:///absolute/path" or a torch.distributed.Store'
)

MOST = 16
"""Addresses of a list."""


@dataclass(frozen=True)
class StoreAddress:
    """Address of a store.

    Attributes:
        scheme: "tcp" or "file".
        host: name or numeric address, without brackets; "" for a file.
        port: 1 to 65535; 0 for a file.
        path: absolute; "" for tcp.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @classmethod
    def parse_all(cls, text: str, *, world: str = "") -> tuple[StoreAddress, ...]:
        """Read one address as `parse`, or a list of tcp ones: ``"tcp://host:port,host:port"``.

        Raises:
            InvalidJoinError: it is neither, or the list is too long or has an address twice.
        """
        scheme, _, rest = text.partition("://")
        if scheme != "tcp" or "," not in rest:
            return (cls.parse(text, world=world),)
        try:
            found = tuple(cls.parse(f"tcp://{each.strip()}", world=world) for each in rest.split(","))
        except InvalidJoinError as error:
            raise InvalidJoinError(
                world, f"store={without_login(text)!r}", rule=error.rule, next_step=error.next_step
            ) from None  # it has a part of the text, which may be one of a password
        if len(set(found)) != len(found) or len(found) > MOST:
            raise InvalidJoinError(
                world,
                f"store={without_login(text)!r}",
                rule=f"A list has up to {MOST} addresses, each once",
                next_step="Give the same list, in the same order, to every member",
            )
        return found

    @classmethod
    def parse(cls, text: str, *, world: str = "") -> StoreAddress:
        """Read ``"tcp://host:port"`` or ``"file:///path"``; an IPv6 address stands in brackets.

        Raises:
            InvalidJoinError: it is neither.
        """

        def bad(rule: str) -> InvalidJoinError:
            return InvalidJoinError(
                world,
                f"store={without_login(text)!r}",
                rule=rule,
                next_step='Write it like "tcp://127.0.0.1:29500"',
            )

        scheme, found, rest = text.partition("://")
        if not found or scheme not in {"tcp", "file"}:
            raise bad(STORE_RULE)
        if scheme == "file":
            if not rest.startswith("/") or rest.endswith("/") or "\0" in rest:
                raise bad("A file store is file:// and the absolute path of a file")
            return cls("file", path=os.path.realpath(rest))
        host, found, port = rest.rpartition(":")
        if not found or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise bad("A tcp store has a host and a port from 1 to 65535")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            with contextlib.suppress(ValueError):  # what is not an address is refused just below
                ipaddress.IPv6Address(host)
                return cls("tcp", host=host, port=int(port))
            raise bad("In brackets stands a numeric IPv6 address")
        if not host or any(each in host for each in ":/@[]?# \0"):
            raise bad("A tcp store has a host and a port; an IPv6 address stands in brackets")
        return cls("tcp", host=host, port=int(port))


def is_list(store: object) -> bool:
    """Whether a store, as given to a join, is a list of addresses."""
    return isinstance(store, str) and store.startswith("tcp://") and "," in store


def list_text(addresses: tuple[StoreAddress, ...]) -> str:
    """Return the list's text."""
    return "tcp://" + ",".join(str(each).removeprefix("tcp://") for each in addresses)


def without_login(text: str) -> str:
    """Return a store's text as it may be shown: without what stands before its last "@", often a password.

    Any scheme may have one, for it may be mistyped; the path of a file has none.
    """
    login, at, rest = text.rpartition("@")
    scheme, slashes, _ = login.partition("://")
    if not at or scheme == "file":
        return text
    return f"{scheme}://...@{rest}" if slashes else f"...@{rest}"
