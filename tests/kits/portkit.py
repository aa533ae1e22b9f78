"""What a run listens at, from the outside: listening sockets of processes, as the kernel's tables in /proc have them.

`Listener` is one socket, whatever table of descriptors it is in (a thread may have one of its own) and however many
processes hold a copy. `named` says what each is, from facts that no guess is needed for: addresses that the test
knows, names that only one kind has, and the helper's twin beside each watchdog.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

Connect = Callable[["Listener"], socket.socket]
"""Connects to a listener, or makes a socket for datagrams to it: plainly, or later with TLS around it."""

_TABLES = {
    "tcp": (socket.AF_INET, socket.SOCK_STREAM),
    "tcp6": (socket.AF_INET6, socket.SOCK_STREAM),
    "udp": (socket.AF_INET, socket.SOCK_DGRAM),
    "udp6": (socket.AF_INET6, socket.SOCK_DGRAM),
}
_LISTEN, _UNCONNECTED = "0A", "07"  # states in these tables
_ACCEPTS = 0x10000  # __SO_ACCEPTCON, of /proc/net/unix
_HELPER = b"evidence_program.py"


@dataclass(frozen=True)
class Listener:
    """One socket that strangers can reach.

    Attributes:
        family, type: as of `socket`.
        address: (host, port), or the name of a unix socket ("@..." for an abstract one).
        pids: of the processes that hold it.
    """

    family: int
    type: int
    address: tuple[str, int] | str
    pids: frozenset[int]

    @property
    def port(self) -> int:
        """The port; 0 of a unix socket."""
        return 0 if isinstance(self.address, str) else self.address[1]

    @property
    def host(self) -> str:
        """Where to reach it: what listens everywhere is reached by loopback."""
        assert not isinstance(self.address, str)
        host = ipaddress.ip_address(self.address[0])
        if not host.is_unspecified:
            return str(host)
        return "127.0.0.1" if host.version == 4 else "::1"

    def __str__(self) -> str:
        kind = {socket.SOCK_STREAM: "tcp", socket.SOCK_DGRAM: "udp"}[socket.SocketKind(self.type)]
        if isinstance(self.address, str):
            return f"unix {self.address}"
        return f"{kind} {self.address[0]} port {self.address[1]}"


def listeners(pids: Iterable[int]) -> list[Listener]:
    """All sockets at which these processes listen, or take datagrams from anywhere."""
    owners: dict[str, set[int]] = {}
    for pid in pids:
        for inode in sockets_of(pid):
            owners.setdefault(inode, set()).add(pid)
    found: dict[str, Listener] = {}
    for pid in {min(each) for each in owners.values()}:  # each may be in a network namespace of its own
        for inode, (family, kind, address) in _bound(pid).items():
            if inode in owners:
                found[inode] = Listener(family, kind, address, frozenset(owners[inode]))
    return sorted(found.values(), key=str)


def descriptors(pid: int) -> list[dict[str, str]]:
    """The tables of descriptors of a process, as names to what they are: a thread may have one of its own."""
    found = []
    for task in _entries(f"/proc/{pid}/task"):
        table = {}
        for each in _entries(task / "fd"):
            with contextlib.suppress(OSError):  # it is closed by now
                table[each.name] = str(each.readlink())
        if table and table not in found:
            found.append(table)
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes of all sockets of a process."""
    targets = {target for table in descriptors(pid) for target in table.values()}
    return {each[len("socket:[") : -1] for each in targets if each.startswith("socket:[")}


def described(pid: int) -> dict[str, str]:
    """All sockets of a process, by inode: both ends with their states, or a unix socket's line."""
    what = {}
    for name, (family, _) in _TABLES.items():
        for line in _lines(pid, name):
            ends = [f"{_host(end, family)}:{_port(end)}" for end in line[1:3]]
            what[line[9]] = f"{name} {' to '.join(ends)}, state {line[3]}"
    for line in _lines(pid, "unix"):
        what[line[6]] = f"unix {' '.join(line[4:6] + line[7:])}"
    return {inode: what.get(inode, "unknown") for inode in sockets_of(pid)}


def held(listener: Listener, ours: socket.socket) -> bool:
    """Whether a process has accepted our connection to a TCP listener, and still has a descriptor for it."""
    port = ours.getsockname()[1]
    for pid in listener.pids:
        for line in _lines(pid, "tcp6" if listener.family == socket.AF_INET6 else "tcp"):
            local, remote, inode = line[1], line[2], line[9]
            if _port(local) == listener.port and _port(remote) == port and inode != "0":
                return True
    return False


def children(pid: int) -> set[int]:
    """A process, and all that descend from it."""
    parents = {}
    for entry in _entries("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, more = {pid}, True
    while more:
        fresh = {child for child, parent in parents.items() if parent in found} - found
        found, more = found | fresh, bool(fresh)
    return found


def named(found: Iterable[Listener], known: Mapping[int | str, str]) -> dict[Listener, str]:
    """Say what each listener is; "" for an unknown one.

    Args:
        found: all listeners of a run.
        known: what is at a port, or under a unix socket's name, that the test knows ("store", "page", ...).
    """
    found = list(found)
    streams = {(each.address, pid) for each in found if each.type == socket.SOCK_STREAM for pid in each.pids}
    # A launcher's helper starts when it is asked for; the socket is there, beside the watchdog's, from the start.
    helpers = {
        each.address
        for each in found
        if each.type == socket.SOCK_DGRAM
        and (_is_helper(each) or any((each.address, pid) in streams for pid in each.pids))
    }
    lanes = {
        int(each.address.rpartition("-")[2])
        for each in found
        if isinstance(each.address, str) and each.address.startswith("@m8d-lane-")
    }
    return {each: _kind(each, known, helpers, lanes) for each in found}


def lanes(pid: int) -> dict[Listener, str]:
    """What listens for lanes now in the network of a process, quickly: whose it is, is not looked up."""
    bound = [Listener(*each, frozenset({pid})) for each in _bound(pid).values()]
    return {each: kind for each, kind in named(bound, {}).items() if kind.startswith("lane")}


def _kind(each: Listener, known: Mapping[int | str, str], helpers: set[object], lanes: set[int]) -> str:
    if isinstance(each.address, str):
        if each.address.startswith("@m8d-lane-"):
            return "lane (unix)"
        return "control" if each.address.endswith("/control.sock") else known.get(each.address, "")
    if each.type == socket.SOCK_DGRAM:
        return "helper" if each.address in helpers else ""
    if each.port in known:
        return known[each.port]
    if each.address in helpers:
        return "watchdog"
    return "lane" if each.port in lanes else ""


def _is_helper(each: Listener) -> bool:
    return any(helps(pid) for pid in each.pids)


def helps(pid: int) -> bool:
    """Whether a process is the helper of another."""
    return _HELPER in _read(pid, "cmdline")


def plain(listener: Listener, timeout: float = 2.0) -> socket.socket:
    """Connect to a listener, as every process that reaches it can: without a certificate or a token."""
    sock = socket.socket(listener.family, listener.type)
    sock.settimeout(timeout)
    try:
        if isinstance(listener.address, str):
            sock.connect(
                listener.address.replace("@", "\0", 1) if listener.address[0] == "@" else listener.address
            )
        else:
            sock.connect((listener.host, listener.port))
    except OSError:
        sock.close()
        raise
    return sock


# -- the kernel's tables


def _bound(pid: int) -> dict[str, tuple[int, int, tuple[str, int] | str]]:
    """By inode: what listens, or takes datagrams from anywhere."""
    found: dict[str, tuple[int, int, tuple[str, int] | str]] = {}
    for name, (family, kind) in _TABLES.items():
        wanted = _LISTEN if kind == socket.SOCK_STREAM else _UNCONNECTED
        for line in _lines(pid, name):
            if line[3] == wanted and _port(line[1]):
                found[line[9]] = family, kind, (_host(line[1], family), _port(line[1]))
    for line in _lines(pid, "unix"):
        flags, kind, inode = int(line[3], 16), int(line[4], 16), line[6]
        if len(line) > 7 and (flags & _ACCEPTS or kind == socket.SOCK_DGRAM):
            found[inode] = socket.AF_UNIX, kind, _renamed(line[7])
    return found


def _lines(pid: int, name: str) -> list[list[str]]:
    return [line.split() for line in _read(pid, f"net/{name}").decode().splitlines()[1:]]


def _renamed(path: str) -> str:
    """The launcher's socket gets its name when it can be connected to; the kernel keeps the first one."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/control.sock" if name == "new.sock" else path


def _port(field: str) -> int:
    return int(field.rpartition(":")[2], 16)


def _host(field: str, family: int) -> str:
    octets = bytes.fromhex(field.partition(":")[0])
    words = struct.unpack(f"={len(octets) // 4}I", octets)  # each as a number of this machine
    return socket.inet_ntop(family, struct.pack(f">{len(words)}I", *words))


def _entries(folder: str | Path) -> list[Path]:
    try:
        return list(Path(folder).iterdir())
    except OSError:  # it has ended
        return []


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""
