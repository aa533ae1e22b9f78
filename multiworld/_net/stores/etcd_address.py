"""Addresses of etcd clusters: text and parts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from multiworld._net.stores.address import without_login
from multiworld.errors import InvalidJoinError

__all__ = ["EtcdAddress", "is_etcd"]

_FILES = ("ca", "cert", "key")


@dataclass(frozen=True)
class EtcdAddress:
    """Address of an etcd cluster, and of the worlds' place in it.

    Attributes:
        endpoints: "host:port" of its members, an IPv6 address in brackets.
        prefix: of all keys, with a slash at the end.
        user: name; "" for none.
        password: of the user; never shown.
        ca, cert, key: paths of PEM files; any of them makes the connections TLS. `ca` is whom to trust,
            `cert` and `key` are this client's.
    """

    endpoints: tuple[str, ...]
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    cert: str = ""
    key: str = ""

    @property
    def secure(self) -> bool:
        """Whether the connections are TLS."""
        return bool(self.ca or self.cert)

    def __str__(self) -> str:
        """The address as it may be shown: without user and password."""
        return f"etcd://{','.join(self.endpoints)}/{self.prefix.rstrip('/')}"

    @classmethod
    def parse(cls, text: str, *, world: str = "") -> EtcdAddress:
        """Read ``"etcd://[user:password@]host:port,.../prefix[?ca=FILE&cert=FILE&key=FILE]"``.

        Raises:
            InvalidJoinError: it is none.
        """

        def bad(rule: str) -> InvalidJoinError:
            return InvalidJoinError(
                world,
                f"store={without_login(text)!r}",
                rule=rule,
                next_step='Write it like "etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/worlds"',
            )

        rest, _, query = text.removeprefix("etcd://").partition("?")
        hosts, _, prefix = rest.partition("/")
        login, at, hosts = hosts.rpartition("@")
        user, colon, password = login.partition(":")
        if at and not (user and colon):
            raise bad("A login is user:password, its special characters percent-encoded")
        endpoints = tuple(each.strip() for each in hosts.split(","))
        for each in endpoints:
            host, _, port = each.rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
                raise bad("Each member of the cluster has a host and a port from 1 to 65535")
        if not prefix.strip("/"):
            raise bad("A prefix of the keys stands behind the hosts")
        options = dict(parse_qsl(query, keep_blank_values=True))
        if not set(options) <= set(_FILES) or ("key" in options) is not ("cert" in options):
            raise bad("Its options are ca, cert and key, paths of PEM files; cert and key belong together")
        if not all(options.values()):  # as of a variable that is not set: without TLS all would be in clear
            raise bad("ca, cert and key are paths of PEM files; one that is not wanted is left out")
        prefix = f"{prefix.strip('/')}/"
        return cls(endpoints, prefix, unquote(user), unquote(password), **options)


def is_etcd(store: str) -> bool:
    """Whether a store's address is that of an etcd cluster."""
    return store.startswith("etcd://")
