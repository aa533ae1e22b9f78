"""Sockets of one gloo group: how to find exactly those, and to shut them down.

gloo has no abort: a collective whose peer is gone or stopped waits for its timeout. Once its sockets are shut
down from outside, every pending and every later operation raises at once. They are found by address: no two
groups connect on a gloo device at the same time (`devices.py`), so the group's sockets are those that its
device's listener accepted since the last one did (local address = the listener's) and those that lead to a
member's device listener (remote address = that listener's). A socket is touched only if descriptor, inode and
both addresses are still what they were.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import stat
import struct
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from multiworld._net import procfs
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

__all__ = [
    "Address", "Spare", "TcpSocket", "accepted", "apply", "find", "forked", "listener", "parse_address",
    "shut", "spare", "still_open",
]  # fmt: skip

_T = TypeVar("_T")
_log = logger(__name__)

Address = tuple[str, int]
"""Numeric host and port."""

_STORAGE = 128  # bytes of a sockaddr_storage
_TYPES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class TcpSocket:
    """One TCP socket of this process.

    Attributes:
        fd: its descriptor.
        inode: of the socket, unique among open ones.
        local: this end.
        remote: the other end; None for a listener.
    """

    fd: int
    inode: int
    local: Address
    remote: Address | None


def parse_address(value: bytes) -> Address | None:
    """Read the address of a device's listener out of what gloo publishes of it in the store.

    The value is a host name and an address, each behind its length (8 bytes), and the address begins with a
    ``sockaddr_storage`` (gloo's ``rendezvous/context.cc`` and ``transport/tcp/address.h``; the same in torch
    2.4 to 2.15).

    Returns:
        None where the value is not of that form.
    """
    if len(value) < 8:
        return None
    (length,) = struct.unpack_from("=Q", value)
    start = 8 + length + 8
    if length > 255 or len(value) < start + _STORAGE:
        return None
    if struct.unpack_from("=Q", value, start - 8)[0] < _STORAGE:
        return None
    (family,) = struct.unpack_from("=H", value, start)
    (port,) = struct.unpack_from("!H", value, start + 2)
    if port == 0 or family not in _TYPES:
        return None
    at, size = (start + 4, 4) if family == socket.AF_INET else (start + 8, 16)
    return _plain(socket.inet_ntop(family, value[at : at + size])), port


def find(
    own: Collection[Address], members: Collection[Address]
) -> tuple[tuple[TcpSocket, ...], tuple[TcpSocket, ...]]:
    """Find a new group's sockets: once per group, after it is built and while its device is exclusive.

    Args:
        own: addresses of its device's listeners here.
        members: of the other members' devices.

    Returns:
        This process's sockets that the listeners `own` accepted, or that lead to those of `members`, without
        those that an earlier call has returned; and the listeners at `own`.
    """
    links, listeners = [], []
    for fd in _descriptors():
        inode = _inode(fd)
        if inode is None:
            continue
        seen = _seen.get(fd)
        link = seen.link if seen is not None and seen.link.inode == inode else _link(fd, fd, inode)
        if link is None:
            continue
        if link.remote is None:
            if link.local in own:
                listeners.append(link)
            continue
        if seen is None or seen.link is not link:
            with _adding[0]:  # another thread may have added and taken it meanwhile
                seen = _seen.get(fd)
                if seen is None or seen.link != link:
                    seen = _seen[fd] = _Seen(link)
        if not seen.taken and (link.local in own or link.remote in members):
            seen.taken = True
            links.append(link)
    return tuple(links), tuple(listeners)


def shut(links: Iterable[TcpSocket]) -> int:
    """Shut down those of `links` that are still what they were; return how many.

    Takes about 15 µs each and waits for nothing; safe in any thread while gloo uses them.
    """
    outcomes = [_attempt(link, lambda sock: sock.shutdown(socket.SHUT_RDWR)) for link in links]
    if missed := outcomes.count(errno.EMFILE):
        _log.warning(
            "no descriptor is free to shut %d of gloo's sockets: operations end at their timeout", missed
        )
    return outcomes.count(0)


def apply(link: TcpSocket, action: Callable[[socket.socket], None]) -> bool:
    """Call `action` with the socket, if it is still the same one; False where it is not, or if that fails."""
    return _attempt(link, action) == 0


def _attempt(link: TcpSocket, action: Callable[[socket.socket], None]) -> int:
    """Do as `apply` does; return 0, or the number of the error for which it was not done."""
    try:
        with _copy_of(link.fd) as copy:
            if _link(copy, link.fd, _inode(copy)) != link:
                return errno.EBADF
            _of(copy, action)
            return 0
    except OSError as error:  # mostly closed meanwhile, or not connected any more
        return error.errno or errno.EBADF


@contextlib.contextmanager
def _copy_of(fd: int) -> Iterator[int]:
    """Give what a descriptor is one more number: this one cannot be reused for another socket."""
    try:
        copy = os.dup(fd)
    except OSError as error:
        kept = None if _kept[0] is None else _kept[0]()
        if error.errno != errno.EMFILE or kept is None:
            raise
        with kept.lent(fd) as copy:
            yield copy
        return
    try:
        yield copy
    finally:
        os.close(copy)


class Spare:
    """A descriptor that is kept, for when this process has no free one; it goes with its last holder.

    Raises:
        OSError: there is none to be kept.
    """

    def __init__(self) -> None:
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._copy = os.dup(self._null)
        except OSError:
            os.close(self._null)
            raise
        weakref.finalize(self, _close, self._null, self._copy).atexit = False
        # Not a lock: a signal's handler may close a world in the middle, and has to give up.
        self._turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._turn.put(None)

    @contextlib.contextmanager
    def lent(self, fd: int) -> Iterator[int]:
        """Let it be what `fd` is, in one step: no other thread can take the number in between."""
        try:
            self._turn.get(timeout=_TURN)
        except queue.Empty:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None
        try:
            yield os.dup2(fd, self._copy, inheritable=False)
        finally:
            os.dup2(self._null, self._copy, inheritable=False)
            self._turn.put(None)


def _close(*numbers: int) -> None:
    for number in numbers:
        os.close(number)


_TURN = 0.1
"""Seconds to wait for another thread that uses the spare descriptor, which takes microseconds."""

_kept: list[weakref.ref[Spare] | None] = [None]


def spare() -> Spare | None:
    """Return the process's spare descriptor, to be held as long as `shut` may be called; None without one."""
    kept = None if _kept[0] is None else _kept[0]()
    if kept is None:
        try:
            kept = Spare()
        except OSError:
            return None
        _kept[0] = weakref.ref(kept)
    return kept


def listener(address: Address) -> TcpSocket | None:
    """Return this process's socket that listens at `address`; None where there is none."""
    for fd in _descriptors():
        inode = _inode(fd)
        seen = _seen.get(fd)
        if inode is not None and (seen is None or seen.link.inode != inode):
            link = _link(fd, fd, inode)
            if link is not None and link.remote is None and link.local == address and _listens(fd):
                return link
    return None


def accepted(own: Collection[Address]) -> tuple[TcpSocket, ...]:
    """Return the connections that this process's listeners at `own` accepted, ended ones too."""
    links = (_link(fd, fd, _inode(fd)) for fd in _descriptors())
    return tuple(each for each in links if each is not None and each.remote and each.local in own)


def still_open(links: Iterable[TcpSocket]) -> tuple[TcpSocket, ...]:
    """Return those of `links` whose descriptor still is that socket; its other end may be gone."""
    return tuple(link for link in links if _inode(link.fd) == link.inode)


@dataclass(eq=False)
class _Seen:
    """A connected socket, whose addresses do not change any more, and whether it is some group's."""

    link: TcpSocket
    taken: bool = False


_seen: dict[int, _Seen] = {}
"""By descriptor. What is closed meanwhile stays until the number is another socket's: asking is one system
call instead of four, for each socket of each world, at each join."""

_adding = [threading.Lock()]  # in a list, to be replaced in a forked child


def forked() -> None:
    """Replace the lock in a forked child, and the spare descriptor: their holders may not exist there."""
    _adding[0] = threading.Lock()
    _kept[0] = None


def _descriptors() -> Iterable[int]:
    return map(int, procfs.names("/proc/self/fd"))


def _link(fd: int, number: int, inode: int | None) -> TcpSocket | None:
    """Describe the descriptor `fd`, as one that is called `number`; None where it is no TCP socket."""
    if inode is None:
        return None
    try:
        local = _of(fd, lambda sock: sock.getsockname())
    except OSError:
        return None
    if not isinstance(local, tuple) or len(local) < 2:  # AF_UNIX, AF_NETLINK, ...
        return None
    try:
        remote = _of(fd, lambda sock: sock.getpeername())
    except OSError:
        remote = None
    return TcpSocket(number, inode, _address(local), None if remote is None else _address(remote))


def _listens(fd: int) -> bool:
    try:
        return bool(_of(fd, lambda sock: sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))
    except OSError:
        return False


def _inode(fd: int) -> int | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _of(fd: int, ask: Callable[[socket.socket], _T]) -> _T:
    """Query a descriptor without closing it: it belongs to another object."""
    # Any family will do: it only bounds the length of an address, and addresses carry their own.
    return ask(_Borrowed(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=fd))


class _Borrowed(socket.socket):
    """Of a descriptor that belongs to another object, and stays open.

    A ``detach`` by the caller would come too late for Ctrl-C, which may come as soon as this exists: the
    destructor is that, and no function in Python, in which a handler may run.
    """

    __slots__ = ()
    __del__ = socket.SocketType.detach


def _address(raw: tuple[str | int, ...]) -> Address:
    return _plain(str(raw[0])), int(raw[1])


def _plain(host: str) -> str:
    """Return an IPv4-mapped IPv6 address as IPv4, and drop the interface's name."""
    return host.removeprefix("::ffff:").partition("%")[0]
