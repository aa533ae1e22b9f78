"""Host address: where other members reach this host.

The first of these that applies:

1. ``M8D_HOST``, an address or a name of this host; ``M8D_IFNAME``, an interface; torch's
   ``GLOO_SOCKET_IFNAME``.
2. The interface that leads to the store. A store at ``tcp://`` loopback is reached from this host only, and
   so are its members.
3. For a store without a host (a file, a store object), or with one that only this host resolves: the
   interface that leads outward, or the first that is up. Loopback where there is no other.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

from multiworld import settings
from multiworld.errors import InvalidJoinError

try:
    import fcntl
except ImportError:  # not on Linux: interfaces have no addresses here, and names of them are refused
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "ELSEWHERE", "LOOPBACK", "chosen", "is_loopback", "is_own", "outward", "resolved", "source_towards",
]  # fmt: skip

LOOPBACK = "127.0.0.1"

ELSEWHERE = "192.0.2.1"
"""An address of TEST-NET-1 (RFC 5737) that stands for any other host; nothing is sent there."""

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IF_INET6 = Path("/proc/net/if_inet6")


def chosen(world: str) -> str | None:
    """Return the numeric address that the settings choose; None where they leave it to the store.

    Raises:
        InvalidJoinError: M8D_HOST is no address of this host, or M8D_IFNAME no interface that has one.
    """
    wanted = settings.load()
    if wanted.host:
        for each in resolved(wanted.host):
            if is_own(each):
                return each
        raise InvalidJoinError(
            world,
            f"M8D_HOST={wanted.host!r}",
            rule="It is an address, or the name of one, of an interface of this host",
            next_step="Give an address that `ip address` shows, and that the other members can reach",
        )
    if wanted.ifname:
        if (address := _first_of(wanted.ifname)) is not None:
            return address
        raise InvalidJoinError(
            world,
            f"M8D_IFNAME={wanted.ifname!r}",
            rule="It names interfaces of this host, and one of them has an address",
            next_step="Give a name that `ip address` shows",
        )
    return _first_of(settings.environment("GLOO_SOCKET_IFNAME") or "")  # gloo itself refuses a wrong one


def outward() -> str:
    """Return the local address that leads to other hosts; loopback where there is no route."""
    if source := source_towards(ELSEWHERE):
        return source
    for _, name in socket.if_nameindex():
        address = _of_interface(name)
        if address is not None and not is_loopback(address) and is_own(address):
            return address
    return LOOPBACK


def is_loopback(address: str) -> bool:
    """Whether a numeric address is local to each host (loopback)."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _first_of(names: str) -> str | None:
    found = (_of_interface(name.strip()) for name in names.split(",") if name.strip())
    return next((address for address in found if address is not None), None)


def _of_interface(name: str) -> str | None:
    """Return an IPv4 address of the interface, or a global IPv6 one; None without either."""
    packed = struct.pack("256s", name.encode()[:15])
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking,
        contextlib.suppress(OSError, AttributeError),
    ):
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, packed)[20:24])
    with contextlib.suppress(OSError):
        for line in _IF_INET6.read_text("ascii").splitlines():
            digits, _, _, scope, _, device = line.split()
            if device == name and scope in {"00", "10"}:  # global, or the host's own
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None


def resolved(host: str) -> list[str]:
    """Return the numeric addresses of a host, IPv4 first; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # it may be no name at all, as "node..example"
        return []
    return [str(to[0]) for *_, to in sorted(found, key=lambda each: each[0] != socket.AF_INET)]


def is_own(address: str) -> bool:
    """Whether a numeric address belongs to an interface of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def source_towards(address: str) -> str:
    """Return the address of this host on the route to a numeric address; "" without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address, 9))  # UDP: nothing is sent, the kernel picks the interface
        return str(probe.getsockname()[0])
    return ""
