"""Isolated descriptor table: descriptors that the kernel closes first when this process is killed.

A killed process frees its memory before it closes its descriptors: milliseconds for each hundred megabytes.
Its threads exit one by one, however, and the last of them frees the memory. `IsolatedTable` is a thread with
a descriptor table of its own (Linux: close_range(2), or unshare(2) with CLONE_FILES; neither needs a
privilege), which the kernel closes when that thread exits, before the memory is freed.

The thread runs almost no Python. A descriptor number means something else in its table than in the rest of
the process, so nothing may print, open or import there, and no object that owns a descriptor may be created
or collected: the garbage collector pauses while it runs Python (`_net/collector_pause.py`), and it waits on a
lock, which allocates nothing. It is no `threading.Thread`, whose start, end and debugger hooks run Python.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import time

from multiworld._net import collector_pause, procfs
from multiworld._net.collector_pause import pause_collector, resume_collector

__all__ = ["MESSAGE", "IsolatedTable", "isolate", "lowest_number"]

MESSAGE = 256
"""Bytes of a closing message, at most; with TLS's record it has fewer than 64."""

_START = 0.9  # seconds that the thread may take to begin: below 1 ms, measured, and more on a busy machine
_PATIENCE = 0.1  # seconds for a command while the control socket is full, and for `settle`
_LEAST = 3  # the standard streams' numbers refer to the null device there
_HIGHEST_NUMBER = 16384  # the kernel allocates a table up to its highest number: 128 KiB here

_COMMAND = struct.Struct("!cQ")
_KEEP, _DROP, _SETTLE = b"k", b"d", b"s"
_READY, _REFUSED = b"y", b"n"

_CLOSE_RANGE = 436  # its number on every architecture that torch is built for
_CLOSE_RANGE_UNSHARE = 2
_CLONE_FILES = 0x400
_LAST = 0xFFFFFFFF


class IsolatedTable:
    """A thread whose descriptors are closed first. For one thread, except `abandon`."""

    def __init__(self, control: socket.socket, number: int, bell: _thread.LockType) -> None:
        self._control = control
        self._bell = bell  # released when there is something to read
        self._number: int | None = number  # of the far end in this table, until the thread has its own
        self._settled = 0

    @classmethod
    def start(cls) -> IsolatedTable | None:
        """Start the thread; None where it cannot be started. `opened` tells whether its table was created."""
        if sys.platform != "linux":
            return None
        try:
            control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        try:
            # The far end is a plain number from here on: an object could close it in the wrong table.
            number = fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, lowest_number())
        except OSError:
            control.close()
            return None
        finally:
            far.close()
        collector_pause.register()
        bell = _thread.allocate_lock()
        bell.acquire()
        try:
            _thread.start_new_thread(_run, (number, bell, _thread.get_native_id()))
        except RuntimeError:
            os.close(number)
            control.close()
            return None
        return cls(control, number, bell)

    def opened(self, within: float = _START) -> bool:
        """Wait at most 0.9 s for the thread's table; False where the system refuses it. Call it once."""
        answer = self._answer(time.monotonic() + within)
        # None: the thread has not run yet. It still needs the number, which stays open until `close`.
        if answer is not None and self._number is not None:
            number, self._number = self._number, None
            os.close(number)  # the thread has its own by now, or has ended
        return answer == _READY

    def keep(self, number: int, connection: socket.socket, closing: bytes) -> bool:
        """Pass `connection` to the thread; False where that fails. The caller then closes its own copy.

        Args:
            number: identifies it in `drop`.
            connection: a stream socket.
            closing: written before the connection is closed in good order, at most `MESSAGE` bytes; a killed
                process writes nothing.
        """
        try:
            self._control.setblocking(False)
            socket.send_fds(self._control, [_COMMAND.pack(_KEEP, number), closing], [connection.fileno()])
        except OSError:
            return False
        self._ring()
        return True

    def drop(self, number: int) -> None:
        """Send a connection's closing message and close it; unknown numbers are ignored."""
        self._send(_DROP, number, time.monotonic() + _PATIENCE)

    def settle(self) -> bool:
        """Wait at most 0.1 s until all commands so far are carried out."""
        deadline = time.monotonic() + _PATIENCE
        self._settled += 1
        if not self._send(_SETTLE, self._settled, deadline):
            return False
        wanted = _COMMAND.pack(_SETTLE, self._settled)
        while (answer := self._answer(deadline)) and answer != wanted:
            continue  # the answer to an earlier call, which had timed out
        return answer == wanted

    def close(self, timeout: float) -> bool:
        """Send every connection's closing message and end the thread; False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if self._number is not None:
            self.opened(min(timeout, _START))
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        self._ring()
        while answer := self._answer(deadline):
            continue
        self._control.close()
        # Only the end of the thread's table closes its end of the control socket.
        return answer == b""

    def abandon(self) -> None:
        """Close a forked child's copy of the control socket: the thread is the parent's."""
        self._control.close()
        if self._number is not None:
            os.close(self._number)

    def _send(self, what: bytes, number: int, deadline: float) -> bool:
        try:
            self._control.settimeout(max(0.0, deadline - time.monotonic()))
            self._control.send(_COMMAND.pack(what, number))
        except OSError:
            return False
        self._ring()
        return True

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is released already, and not taken yet
            self._bell.release()

    def _answer(self, deadline: float) -> bytes | None:
        """Return an answer; ``b""`` when the thread has ended; None at the deadline."""
        try:
            self._control.settimeout(max(0.0, deadline - time.monotonic()))
            return self._control.recv(_COMMAND.size)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:
            return b""


def _run(end: int, bell: _thread.LockType, starter: int) -> None:
    """Thread entry point. `end`: number of the control socket; the starter closes its copy."""
    pause_collector()
    own = (
        _thread.get_native_id() != starter
    )  # gevent and eventlet patch threads into greenlets of the same thread
    if own:
        # Python's signal handler writes to a wake-up descriptor, which is another one in this table.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    control = socket.socket(fileno=end)
    control.settimeout(None)  # overrides socket.setdefaulttimeout()
    try:
        isolated = own and isolate(end)
        control.send(_READY if isolated else _REFUSED)
        if isolated:
            _serve(control, bell, end + 1)
    finally:
        control.detach()  # closed with this thread's table, or by the starter
        resume_collector()


def _serve(control: socket.socket, bell: _thread.LockType, lowest: int) -> None:
    kept: dict[int, tuple[int, bytes]] = {}
    control.setblocking(False)
    try:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(control, _COMMAND.size + MESSAGE, 1)
            except BlockingIOError:
                resume_collector()
                bell.acquire()
                pause_collector()
                continue
            if not data:
                return
            what, number = _COMMAND.unpack_from(data)
            if what == _KEEP and descriptors:
                kept[number] = _move_up(descriptors[0], lowest), data[_COMMAND.size :]
            elif what == _DROP:
                _close_with(*kept.pop(number, (None, b"")))
            elif what == _SETTLE:
                with contextlib.suppress(OSError):  # the waiter timed out
                    control.send(data, socket.MSG_DONTWAIT)
    except OSError:
        return  # the control socket is broken; the process lives, so its peers get the closing message
    finally:
        for descriptor, closing in kept.values():
            _close_with(descriptor, closing)


def lowest_number() -> int:
    """Return the lowest descriptor number used in the table, above those that the process normally uses.

    An object of the process that is collected in the thread then closes none of the table's descriptors.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = limit // 2 if limit != resource.RLIM_INFINITY else _HIGHEST_NUMBER
    return max(_LEAST, min(half, _HIGHEST_NUMBER))


def _move_up(descriptor: int, lowest: int) -> int:
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:  # no number is free there
        return descriptor
    os.close(descriptor)
    return moved


def _close_with(descriptor: int | None, closing: bytes) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):  # the other end closed first
            os.write(descriptor, closing)
        os.close(descriptor)


def isolate(end: int | None = None) -> bool:
    """Give this thread a table with only `end` and the null device; False where the system refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    close_range = libc.syscall
    close_range.argtypes = [ctypes.c_long, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint]
    try:
        # Containers that refuse unshare(2) (Docker's do by default) allow this.
        # Most descriptors are below `end`: copied and closed in one atomic call.
        if close_range(_CLOSE_RANGE, 0, _LAST if end is None else end - 1, _CLOSE_RANGE_UNSHARE) == 0:
            if end is not None:
                close_range(_CLOSE_RANGE, end + 1, _LAST, 0)
        elif libc.unshare(_CLONE_FILES) == 0:  # before Linux 5.9
            _close_all_but(end)
        else:
            return False
        number = os.open(os.devnull, os.O_RDWR)
        while number < _LEAST - 1:
            number = os.dup(number)
    except OSError:
        return False
    return True


def _close_all_but(end: int | None) -> None:
    for name in procfs.names("/proc/thread-self/fd"):
        if end is None or int(name) != end:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
