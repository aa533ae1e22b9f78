"""TCPStore server in a thread with its own descriptor table, separate from the process's.

torch's server (C++) accepts every connection to the store's port, at a descriptor each; with none left, every
world's connections and the program's own files fail. In a table of its own (see `_net/descriptor_table.py`)
the server can exhaust only that table. The kernel holds connections back until they send data
(TCP_DEFER_ACCEPT), and the thread regularly closes those that do not prove to be clients.

An object that owns a descriptor and is garbage-collected in this thread closes a number of this table. The
numbers that the process uses therefore refer to the null device here.
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

from multiworld._core.client_detection import PATIENCE, PATIENCE_BLOCKED, AcceptedConnection, ClientCheck
from multiworld._net import procfs
from multiworld._net.descriptor_table import isolate, lowest_number

__all__ = ["StoreServer", "older_than"]

dist: Any = torch.distributed  # it exports the stores without saying so to type checkers

_LOOK = 1.0  # seconds between two checks of the connections
_SOON = 0.1  # with torch's older server, which an incomplete greeting blocks
_START, _ENDING = 10.0, 10.0  # seconds beyond torch's timeout; both normally take milliseconds
_DEFER = 60  # seconds that the kernel holds a silent connection back
_NULLS = 1024  # numbers that refer to the null device, at most

_BOUND, _REFUSED, _FAILED = b"b", b"r", b"f"
_ANSWER = struct.Struct("!cQ")

# struct tcp_info of linux/tcp.h: tcpi_bytes_received and tcpi_data_segs_out
_INFO, _INFO_SIZE = struct.Struct("=128xQ20xI"), 160


class StoreServer:
    """TCPStore server at exactly one address; the socket that TCPStore opens listens on every interface.

    Args:
        family: of the address.
        target: numeric host, and port.
        timeout: seconds that torch may take to connect to its own server.

    Attributes:
        port: where it listens.
        thread: native id of the thread that owns its descriptor table.

    Raises:
        OSError: it cannot listen there.
        RuntimeError: torch's.
    """

    def __init__(self, family: int, target: tuple[str, int], *, timeout: float = 30.0) -> None:
        self.port = target[1]
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A plain number: a socket object could be collected, and close it, in the wrong table.
            number = fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, lowest_number())
        except BaseException:
            self._control.close()
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
            self._control.close()
            raise
        self._control.settimeout(timeout + _START)
        try:
            answer = self._control.recv(_ANSWER.size)
        except TimeoutError:
            answer = b""
        if not shared[0]:
            os.close(number)  # the thread has its own
        what, code = _ANSWER.unpack(answer) if answer else (_REFUSED, errno.ETIMEDOUT)
        self.thread = code
        if what == _BOUND:
            self._finish = weakref.finalize(self, _end, self._control, os.getpid())
            self._finish.atexit = False
            return
        self._control.close()
        if what == _FAILED:
            raise failed.pop()
        raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Stop the server and free the port, within 10 s; so does losing the last reference. Idempotent."""
        self._finish()


def _end(control: socket.socket, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has only a copy
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_WR)  # a forked child may have a copy of this end
        control.settimeout(_ENDING)
        with contextlib.suppress(OSError):
            while control.recv(_ANSWER.size):
                continue
    control.close()


def _run(
    end: int,
    family: int,
    target: tuple[str, int],
    timeout: float,
    starter: int,
    failed: list[Exception],
    shared: list[bool],
) -> None:
    """Thread entry point. `end`: number of the control socket."""
    own = (
        _thread.get_native_id() != starter
    )  # gevent and eventlet patch threads into greenlets of the same thread
    if own:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    control = socket.socket(fileno=end)
    server = None
    try:
        used = max(map(int, procfs.names("/proc/self/fd")), default=0)
        if own and isolate(end):
            shared[0] = False
            _fill(min(used, lowest_number(), _NULLS))
        server = _serve(family, target, timeout)
        control.send(_ANSWER.pack(_BOUND, _thread.get_native_id()))
        _watch(control, target[1])
    except OSError as error:
        with contextlib.suppress(OSError):
            control.send(_ANSWER.pack(_REFUSED, error.errno or errno.EIO))
    except Exception as error:  # noqa: BLE001  (re-raised by the constructor)
        failed.append(error)
        with contextlib.suppress(OSError):
            control.send(_ANSWER.pack(_FAILED, 0))
    finally:
        del server  # its destructor joins its thread
        if shared[0]:
            control.close()
        else:
            control.detach()  # closed with this thread's table


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
    """End connections to hosts that are gone after a minute: accepted sockets inherit the options (Linux)."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _watch(control: socket.socket, port: int) -> None:
    quick = not _libuv_takes_a_socket()
    clients = ClientCheck(answers=not quick, patience=PATIENCE_BLOCKED if quick else PATIENCE)
    control.settimeout(_SOON if quick else _LOOK)
    while not _closed(control):
        for each in clients.overdue(_unproven(port, clients), time.monotonic()):
            _hang_up(each)


def _closed(control: socket.socket) -> bool:
    """Wait one interval, the socket's timeout; return whether the other end closed it."""
    try:
        return not control.recv(1)
    except TimeoutError:
        return False


def _unproven(port: int, clients: ClientCheck) -> list[AcceptedConnection]:
    found = []
    for name in procfs.names("/proc/thread-self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError, struct.error):  # closed meanwhile, or no TCP socket
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode) or clients.is_client(fd, status.st_ino):
                continue
            sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=fd)
            try:
                sock.getpeername()  # the listener has none
                local = sock.getsockname()
                if isinstance(local, tuple) and local[1:2] == (
                    port,
                ):  # the control socket and other clients differ
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
                    received, sent = _INFO.unpack_from(info)
                    found.append(AcceptedConnection(fd, status.st_ino, received, sent > 0))
            finally:
                sock.detach()
    return found


def _hang_up(accepted: AcceptedConnection) -> None:
    """Shut the connection down, so that torch's server closes it."""
    with contextlib.suppress(OSError):
        copy = os.dup(accepted.fd)
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=copy)
        with sock:
            if os.fstat(copy).st_ino == accepted.inode:
                sock.shutdown(socket.SHUT_RDWR)


def older_than(*version: int) -> bool:
    """Whether torch is older than that."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < version


def _libuv_takes_a_socket() -> bool:
    """Whether torch's libuv server, which an incomplete query does not block, accepts an open socket.

    Decided by version, because asking the build prints an error: 2.4 and 2.6 refuse, 2.9 accepts.
    """
    return not older_than(2, 9)
