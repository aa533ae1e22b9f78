"""Descriptors that the kernel closes first when this process is killed.

A killed process frees its memory before it closes its descriptors: milliseconds for each hundred megabytes. But
each thread leaves on its own, and the memory is freed by the last of them. The vault is a thread with a table of
descriptors of its own (Linux: close_range(2), or unshare(2) with CLONE_FILES, neither of which needs a privilege):
what is in that table alone is closed when that thread goes, whatever the memory.

The thread runs next to no Python. With its table a descriptor's number means something else than in the rest of the
process, so nothing may print, open or import there, and no object that owns a descriptor may come or go. What
remains is a collector of garbage that happens to run there and to find such an object: a descriptor of that number
would stay open in the process. So no more is allocated than a command needs, and there is no `threading.Thread`, whose
beginning, end and hooks of debuggers are Python too.
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

__all__ = ["Vault", "alone", "floor"]

_START = 0.25  # seconds that the thread may take to begin; a fraction of a millisecond, measured
_PATIENCE = 0.1  # seconds for a command that finds the line full, and for `settle`
_LEAST = 3  # the standard streams' numbers are the null device there
_HIGHEST_FLOOR = 16384  # a table has room for all numbers below its highest: 128 KiB here

_COMMAND = struct.Struct("!cQ")
_KEEP, _DROP, _SETTLE = b"k", b"d", b"s"
_READY, _REFUSED = b"y", b"n"

_CLOSE_RANGE = 436  # its number on every architecture that torch is built for
_CLOSE_RANGE_UNSHARE = 2
_CLONE_FILES = 0x400
_LAST = 0xFFFFFFFF


class Vault:
    """See the module. Used by one thread, but for `abandon`."""

    def __init__(self, line: socket.socket, number: int) -> None:
        self._line = line
        self._number: int | None = number  # of the far end in this table, until the thread has its own
        self._settled = 0

    @classmethod
    def start(cls, farewell: bytes) -> Vault | None:
        """Start the thread; None where it cannot be. `opened` says whether the vault came about.

        Args:
            farewell: written to each descriptor before it is closed. Only a process that dies says nothing.
        """
        if sys.platform != "linux":
            return None
        try:
            line, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        try:
            # The far end is a plain number from here on: an object could close it in the wrong table.
            number = fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, floor())
        except OSError:
            line.close()
            return None
        finally:
            far.close()
        try:
            _thread.start_new_thread(_run, (number, farewell, _thread.get_native_id()))
        except RuntimeError:
            os.close(number)
            line.close()
            return None
        return cls(line, number)

    def opened(self) -> bool:
        """Wait until the thread has its table, 0.25 s at most; False where the system refuses it. To be called once."""
        answer = self._answer(time.monotonic() + _START)
        # None: this process hardly runs. The number stays open, for the thread is about to use it, until `close`.
        if answer is not None and self._number is not None:
            number, self._number = self._number, None
            os.close(number)  # the thread has its own by now, or has ended
        return answer == _READY

    def keep(self, number: int, connection: socket.socket) -> bool:
        """Hand `connection` over; the caller closes its own copy then. False: it was not taken.

        Args:
            number: what it is called in `drop`.
            connection: a stream.
        """
        try:
            self._line.setblocking(False)
            socket.send_fds(self._line, [_COMMAND.pack(_KEEP, number)], [connection.fileno()])
        except OSError:
            return False
        return True

    def drop(self, number: int) -> None:
        """Say farewell on a connection, and close it; one that is not there is none to close."""
        self._send(_DROP, number, time.monotonic() + _PATIENCE)

    def settle(self) -> bool:
        """Wait until everything that was asked for is done, 0.1 s at most."""
        deadline = time.monotonic() + _PATIENCE
        self._settled += 1
        if not self._send(_SETTLE, self._settled, deadline):
            return False
        wanted = _COMMAND.pack(_SETTLE, self._settled)
        while (answer := self._answer(deadline)) and answer != wanted:
            continue  # it answered a call before this one, which had given up
        return answer == wanted

    def close(self, timeout: float) -> bool:
        """Say farewell on every connection, and end the thread; False if it has not ended within `timeout` seconds."""
        if self._number is not None:
            self.opened()
        deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)
        while answer := self._answer(deadline):
            continue
        self._line.close()
        # Nothing but the end of the thread's table closes its end of the line.
        return answer == b""

    def abandon(self) -> None:
        """Close a forked child's copy of the line: the thread is the parent's."""
        self._line.close()
        if self._number is not None:
            os.close(self._number)

    def _send(self, what: bytes, number: int, deadline: float) -> bool:
        try:
            self._line.settimeout(max(0.0, deadline - time.monotonic()))
            self._line.send(_COMMAND.pack(what, number))
        except OSError:
            return False
        return True

    def _answer(self, deadline: float) -> bytes | None:
        """Return an answer, ``b""`` at the end of the thread, None at the deadline."""
        try:
            self._line.settimeout(max(0.0, deadline - time.monotonic()))
            return self._line.recv(_COMMAND.size)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:
            return b""


def _run(end: int, farewell: bytes, starter: int) -> None:
    """Be the vault: the thread's function. `end`: of the line; in this process's table it is the other thread's."""
    own = _thread.get_native_id() != starter  # else it is no thread: gevent's and eventlet's are not
    if own:
        # A signal is for a thread that has the process's descriptors: Python's handler writes to a wake-up pipe.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    line = socket.socket(fileno=end)
    line.settimeout(None)  # whatever socket.setdefaulttimeout() says
    try:
        isolated = own and alone(end)
        line.send(_READY if isolated else _REFUSED)
        if isolated:
            _serve(line, farewell, end + 1)
    finally:
        line.detach()  # its number is closed by the end of this thread's table, or by the other thread


def _serve(line: socket.socket, farewell: bytes, floor: int) -> None:
    kept: dict[int, int] = {}
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(line, _COMMAND.size, 1)
            if not data:
                return
            what, number = _COMMAND.unpack(data)
            if what == _KEEP and descriptors:
                kept[number] = _lift(descriptors[0], floor)
            elif what == _DROP:
                _part(kept.pop(number, None), farewell)
            elif what == _SETTLE:
                with contextlib.suppress(OSError):  # nobody waits for it any more
                    line.send(data, socket.MSG_DONTWAIT)
    except OSError:
        return  # the line is broken; whatever happens here, the process lives, and its peers are told below
    finally:
        for descriptor in kept.values():
            _part(descriptor, farewell)


def floor() -> int:
    """Return the least number for what the vault has: one that the rest of the process hardly comes to.

    So a collector of garbage that closes somebody else's number in the vault closes nothing that is the vault's.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = limit // 2 if limit != resource.RLIM_INFINITY else _HIGHEST_FLOOR
    return max(_LEAST, min(half, _HIGHEST_FLOOR))


def _lift(descriptor: int, floor: int) -> int:
    try:
        lifted = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, floor)
    except OSError:  # no number is left there
        return descriptor
    os.close(descriptor)
    return lifted


def _part(descriptor: int | None, farewell: bytes) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):  # the other end was faster
            os.write(descriptor, farewell)
        os.close(descriptor)


def alone(end: int) -> bool:
    """Give this thread a table of its own with nothing but `end` and the null device; False: refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    close_range = libc.syscall
    close_range.argtypes = [ctypes.c_long, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint]
    try:
        # Containers that refuse unshare(2) (Docker's do by default) allow this.
        # All but a few are below `end`: copied and closed in one call, which nobody can come between.
        if close_range(_CLOSE_RANGE, 0, end - 1, _CLOSE_RANGE_UNSHARE) == 0:
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


def _close_all_but(end: int) -> None:
    for name in os.listdir("/proc/thread-self/fd"):  # noqa: PTH208  (a list, before anything is closed)
        if int(name) != end:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))
