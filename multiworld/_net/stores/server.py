"""A store's server whose visitors cost the process nothing: a thread with a table of descriptors of its own.

Whoever reaches the port of a store is accepted, in C++, and has a descriptor of the process for it; with none left
every world's connections and the program's own files fail. In a table of its own (see `_net/descriptor_table.py`) the server can
only run out of its own. The kernel keeps connections on which nothing was said from it for a while
(TCP_DEFER_ACCEPT), and regularly the thread hangs up on those that did not turn out to be clients'.

As in the vault, an object that owns a descriptor and is collected here as garbage closes another's number: the numbers
that the process uses are the null device's here.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime as dt
import errno
import fcntl
import os
import signal
import socket
import stat
import struct
import time
import weakref
from typing import Any

import torch
import torch.distributed

from multiworld._core.store_clients import IMPATIENCE, PATIENCE, Visit, Visitors
from multiworld._net.descriptor_table import alone, floor

__all__ = ["StoreServer", "older_than"]

dist: Any = torch.distributed  # it exports the stores without saying so to type checkers

_LOOK = 1.0  # seconds between two looks at the visitors
_SOON = 0.1  # the same with torch's older server, which a visitor that says half a word blocks
_START, _ENDING = 10.0, 10.0  # seconds; beyond torch's own timeout; both take milliseconds
_DEFER = 60  # seconds that the kernel keeps a connection on which nothing was said
_NULLS = 1024  # numbers that are the null device's at most

_BOUND, _REFUSED, _FAILED = b"b", b"r", b"f"
_ANSWER = struct.Struct("!cQ")

# struct tcp_info of linux/tcp.h: tcpi_bytes_received and tcpi_data_segs_out
_INFO, _INFO_SIZE = struct.Struct("=128xQ20xI"), 160


class StoreServer:
    """A TCPStore's server at exactly one address: TCPStore's own socket would listen on every interface.

    Args:
        family: of the address.
        target: numeric host, and port.
        timeout: seconds that torch tries to reach its own server.

    Attributes:
        port: it listens at.
        thread: number of the thread whose table of descriptors it uses.

    Raises:
        OSError: it cannot listen there.
        RuntimeError: torch's.
    """

    def __init__(self, family: int, target: tuple[str, int], *, timeout: float = 30.0) -> None:
        self.port = target[1]
        self._line, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # The far end is a plain number from here on: an object could close it in the wrong table.
            number = fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, floor())
        except BaseException:
            self._line.close()
            raise
        finally:
            far.close()
        failed: list[Exception] = []
        shared = [True]
        try:
            _thread.start_new_thread(
                _run, (number, family, target, timeout, _thread.get_native_id(), failed, shared)
            )
        except BaseException:
            os.close(number)
            self._line.close()
            raise
        self._line.settimeout(timeout + _START)
        try:
            answer = self._line.recv(_ANSWER.size)
        except TimeoutError:
            answer = b""
        if not shared[0]:
            os.close(number)  # the thread has its own
        what, code = _ANSWER.unpack(answer) if answer else (_REFUSED, errno.ETIMEDOUT)
        self.thread = code
        if what == _BOUND:
            self._finish = weakref.finalize(self, _end, self._line, os.getpid())
            self._finish.atexit = False
            return
        self._line.close()
        if what == _FAILED:
            raise failed.pop()
        raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """End it, as its last reference does; the port is free then. Takes 10 s at most. Harmless when repeated."""
        self._finish()


def _end(line: socket.socket, pid: int) -> None:
    if os.getpid() == pid:  # else it is a forked child's copy: the server is the parent's
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)  # a forked child may have a copy of this end
        line.settimeout(_ENDING)
        with contextlib.suppress(OSError):
            while line.recv(_ANSWER.size):
                continue
    line.close()


def _run(
    end: int,
    family: int,
    target: tuple[str, int],
    timeout: float,
    starter: int,
    failed: list[Exception],
    shared: list[bool],
) -> None:
    """Serve: the thread's function. `end`: of the line."""
    own = _thread.get_native_id() != starter  # else it is no thread: gevent's and eventlet's are not
    if own:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    line = socket.socket(fileno=end)
    server = None
    try:
        used = max(map(int, os.listdir("/proc/self/fd")), default=0)  # noqa: PTH208  (names only)
        if own and alone(end):
            shared[0] = False
            _fill(min(used, floor(), _NULLS))
        server = _serve(family, target, timeout)
        line.send(_ANSWER.pack(_BOUND, _thread.get_native_id()))
        _watch(line, target[1])
    except OSError as error:
        with contextlib.suppress(OSError):
            line.send(_ANSWER.pack(_REFUSED, error.errno or errno.EIO))
    except Exception as error:  # noqa: BLE001  (torch's: raised where it is waited for)
        failed.append(error)
        with contextlib.suppress(OSError):
            line.send(_ANSWER.pack(_FAILED, 0))
    finally:
        del server  # its destructor joins its thread
        if shared[0]:
            line.close()
        else:
            line.detach()  # closed by the end of this thread's table: then everything else is closed as well


def _fill(top: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    while null < top:
        null = os.dup(null)


def _serve(family: int, target: tuple[str, int], timeout: float) -> Any:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _keep_alive(sock)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER)
        sock.bind(target)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    fd = sock.detach()  # from here on TCPStore's
    return dist.TCPStore(
        target[0],
        target[1],
        None,
        is_master=True,
        timeout=dt.timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=fd,
        use_libuv=_libuv_takes_a_socket(),
    )


def _keep_alive(listener: socket.socket) -> None:
    """Let connections to hosts that are gone end, a minute later: accepted sockets inherit this (Linux)."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _watch(line: socket.socket, port: int) -> None:
    quick = not _libuv_takes_a_socket()
    visitors = Visitors(answers=not quick, patience=IMPATIENCE if quick else PATIENCE)
    line.settimeout(_SOON if quick else _LOOK)
    while True:
        try:
            if not line.recv(1):
                return
        except TimeoutError:  # noqa: PERF203  (how it waits)
            for each in visitors.look(_visits(port, visitors), time.monotonic()):
                _hang_up(each)


def _visits(port: int, visitors: Visitors) -> list[Visit]:
    found = []
    for name in os.listdir("/proc/thread-self/fd"):  # noqa: PTH208  (names only)
        fd = int(name)
        with contextlib.suppress(OSError, struct.error):  # closed meanwhile, or no TCP socket
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode) or visitors.known(fd, status.st_ino):
                continue
            sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=fd)
            try:
                sock.getpeername()  # the listener has none
                local = sock.getsockname()
                if isinstance(local, tuple) and local[1:2] == (port,):  # else it is the line, or a client's
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
                    received, sent = _INFO.unpack_from(info)
                    found.append(Visit(fd, status.st_ino, received, sent > 0))
            finally:
                sock.detach()
    return found


def _hang_up(visit: Visit) -> None:
    """Let the server find the connection at its end; it closes it."""
    with contextlib.suppress(OSError):
        copy = os.dup(visit.fd)
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=copy)
        with sock:
            if os.fstat(copy).st_ino == visit.inode:
                sock.shutdown(socket.SHUT_RDWR)


def older_than(*version: int) -> bool:
    """Whether torch is older than that."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < version


def _libuv_takes_a_socket() -> bool:
    """Whether the libuv server, which no half-sent query can block, listens on a socket that it is given.

    The build cannot be asked without it printing an error, so this is by version: 2.4 and 2.6 refuse, 2.9 accepts.
    """
    return not older_than(2, 9)
