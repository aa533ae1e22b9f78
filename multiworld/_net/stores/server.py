"""TCPStore server in a thread with its own descriptor table, separate from the process's.

torch's server (C++) accepts every connection to the store's port, at a descriptor each; with none left, every
world's connections and the program's own files fail. In a table of its own (see `_net/descriptor_table.py`)
the server can exhaust only that table. The kernel holds connections back until they send data
(TCP_DEFER_ACCEPT), and the thread regularly closes those that do not prove to be clients.

No garbage may be collected in that thread (see `_net/collector_pause.py`): it runs Python only when a second
thread, which has the process's table, has paused the collector and gives it a turn. An object that owns a
descriptor and loses its last reference there closes a number of its table, so the numbers that the process
uses refer to the null device in it.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime as dt
import errno
import os
import resource
import signal
import socket
import stat
import struct
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from multiworld._core.client_detection import PATIENCE, PATIENCE_BLOCKED, AcceptedConnection, ClientCheck
from multiworld._net import collector_pause, procfs
from multiworld._net.collector_pause import pause_collector, resume_collector
from multiworld._net.descriptor_table import isolate, lowest_number
from multiworld._net.stores.listening import listening
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["StoreServer", "older_than"]

_log = logger(__name__)
dist: Any = torch.distributed  # it exports the stores without saying so to type checkers

_LOOK = 1.0  # seconds between two checks of the connections
_SOON = 0.1  # with torch's older server, which an incomplete greeting blocks
_START, _ENDING = 10.0, 10.0  # seconds beyond torch's timeout; both normally take milliseconds
_NULLS = 1024  # numbers that refer to the null device, at most

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
        collector_pause.register()
        serving = _Serving(family, target, timeout)
        _thread.start_new_thread(_accompany, (serving,))
        if not serving.began.acquire(timeout=timeout + _START):
            serving.closing.release()
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if serving.failed:
            raise serving.failed.pop()
        self.thread = serving.thread
        self._finish = weakref.finalize(self, _end, serving, os.getpid())
        self._finish.atexit = False

    def close(self) -> None:
        """Stop the server and free the port, within 10 s; so does losing the last reference. Idempotent."""
        self._finish()


class _Serving:
    """What the two threads of a server share: the one with its table, and the one that accompanies it.

    Attributes:
        family: of the address.
        target: numeric host, and port.
        timeout: torch's, seconds.
        failed: the error with which it ended instead of beginning.
        thread: native id of the thread with the table.
        missed: the error of its last turn, after which it goes on.
        over: that thread waits for no more turns.
        parting: that thread hangs up on all clients in its next turn.
        ending: the next turn of that thread is its last.
        turn: released when that thread is to run.
        turned: released when it has, and waits again or ends.
        began: released when the server stands, or has failed.
        closing: released when it is to end.
        ended: released when it has.
    """

    def __init__(self, family: int, target: tuple[str, int], timeout: float) -> None:
        self.family, self.target, self.timeout = family, target, timeout
        self.failed: list[Exception] = []
        self.thread = 0
        self.missed: OSError | None = None
        self.over = self.parting = self.ending = False
        locks = [_thread.allocate_lock() for _ in range(5)]
        for each in locks:
            each.acquire()
        self.turn, self.turned, self.began, self.closing, self.ended = locks


def _end(serving: _Serving, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has only a copy
        serving.closing.release()
        serving.ended.acquire(timeout=_ENDING)


def _accompany(serving: _Serving) -> None:
    """Thread entry point, in the process's table: give the other thread its turns, the collector paused."""
    pause_collector()
    try:
        try:
            _thread.start_new_thread(_run, (serving, _thread.get_native_id()))
        except RuntimeError as error:  # the host has no thread left
            serving.failed.append(error)
        else:
            serving.turned.acquire()
    finally:
        resume_collector()
    failed = bool(serving.failed)  # the caller takes it
    serving.began.release()
    if not failed:
        quick = not _libuv_takes_a_socket()
        while not serving.over and not serving.closing.acquire(timeout=_SOON if quick else _LOOK):
            _have_a_turn(serving)
        if serving.over:
            _log.error("the store at %s:%d has ended: %s", *serving.target, serving.failed)
            serving.ended.release()
            return
        if quick:  # its server's destructor, which has the GIL, waits for a thread that half a query blocks
            serving.parting = True
            _have_a_turn(serving)
        # No pause: next to nothing is allocated there at the end, and torch's server may take a while to end.
        serving.ending = True
        serving.turn.release()
        serving.turned.acquire()
        serving.ended.release()


def _have_a_turn(serving: _Serving) -> None:
    pause_collector()
    try:
        serving.turn.release()
        serving.turned.acquire()
    finally:
        resume_collector()
    if serving.missed is not None:  # logged here: that thread's descriptors are others
        _log.debug("connections of the store at %s:%d were not checked: %s", *serving.target, serving.missed)
        serving.missed = None


def _run(serving: _Serving, starter: int) -> None:
    """Thread entry point, with a table of its own; it waits on a lock, which allocates nothing."""
    own = (
        _thread.get_native_id() != starter
    )  # gevent and eventlet patch threads into greenlets of the same thread
    if own:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    server = None
    try:
        used = max(map(int, procfs.names("/proc/self/fd")), default=0)
        if own and isolate():
            _fill(min(used, lowest_number(), _NULLS))
        server = _serve(serving.family, serving.target, serving.timeout)
        serving.thread = _thread.get_native_id()
        _watch(serving)
    except Exception as error:  # noqa: BLE001  (re-raised by the constructor)
        serving.failed.append(error)
    finally:
        del server  # its destructor joins its thread
        serving.over = True
        serving.turned.release()


def _fill(top: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    while null < top:
        null = os.dup(null)


def _serve(family: int, target: tuple[str, int], timeout: float) -> Any:
    fd = listening(family, target).detach()  # from here on TCPStore's
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


def _watch(serving: _Serving) -> None:
    quick = not _libuv_takes_a_socket()
    clients = ClientCheck(answers=not quick, patience=PATIENCE_BLOCKED if quick else PATIENCE)
    with contextlib.closing(_Spare()) as spare:
        while True:
            serving.turned.release()
            serving.turn.acquire()
            if serving.ending:
                return
            try:
                if serving.parting:
                    overdue: Iterable[AcceptedConnection] = _accepted(serving.target[1], lambda _, __: False)
                else:
                    accepted = _accepted(serving.target[1], clients.is_client)
                    overdue = clients.overdue(accepted, time.monotonic())
                for each in overdue:
                    spare.hang_up(each)
            except OSError as error:
                serving.missed = error.with_traceback(None)


def _accepted(port: int, but: Callable[[int, int], bool]) -> list[AcceptedConnection]:
    """Return what was accepted at `port`, but what `but` leaves out by descriptor and inode."""
    found = []
    for fd in _descriptors():
        with contextlib.suppress(OSError, struct.error):  # closed meanwhile, or no TCP socket
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode) or but(fd, status.st_ino):
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


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in procfs.names("/proc/thread-self/fd")]
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        # Strangers have filled the table, and a listing needs a descriptor: nearly every number is open.
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class _Spare:
    """A descriptor for copies of others, reserved while some are free: strangers may fill the table."""

    def __init__(self) -> None:
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._number = os.dup(self._null)

    def close(self) -> None:
        os.close(self._number)
        os.close(self._null)

    def hang_up(self, accepted: AcceptedConnection) -> None:
        """Shut the connection down, so that torch's server closes it."""
        with contextlib.suppress(OSError):
            os.dup2(accepted.fd, self._number, inheritable=False)
            try:
                sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=self._number)
                try:
                    if os.fstat(self._number).st_ino == accepted.inode:
                        sock.shutdown(socket.SHUT_RDWR)
                finally:
                    sock.detach()
            finally:
                os.dup2(self._null, self._number, inheritable=False)


def older_than(*version: int) -> bool:
    """Whether torch is older than that."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < version


def _libuv_takes_a_socket() -> bool:
    """Whether torch's libuv server, which an incomplete query does not block, accepts an open socket.

    Decided by version, because asking the build prints an error: 2.4 and 2.6 refuse, 2.9 accepts.
    """
    return not older_than(2, 9)
