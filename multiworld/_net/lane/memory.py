"""Reading a message from the memory of a member on this host (Linux: process_vm_readv).

Whether that is possible is proved for each connection, because no configuration tells it: another host or
container may have a process of the same pid, and the kernel may refuse. It refuses processes of other users;
under Yama (ptrace_scope 1, many distributions' default) all processes that are not descendants of the reader;
and containers may filter the call. A process could exempt itself from Yama with PR_SET_PTRACER, for every
process of its user: a library does not weaken its process so. Wherever the proof fails the bytes travel.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import secrets
import select
import struct
import weakref
from typing import TYPE_CHECKING

from multiworld._net import procfs
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ANSWER_SIZE", "OFFER_SIZE", "Copied", "MemoryReader", "Proof", "reader_of"]

_log = logger(__name__)

_PIECE = 16 << 20  # bytes of one system call, about a millisecond: signals are handled between two
_SECRET_SIZE = 16
_OFFER = struct.Struct("<iQI")  # pid, address, length
_UNREAD = bytes(hashlib.sha256().digest_size)

OFFER_SIZE = _OFFER.size
"""Bytes of `Proof.offer`."""

ANSWER_SIZE = len(_UNREAD)
"""Bytes of `Proof.answer`."""


class _Range(ctypes.Structure):
    """The kernel's struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _system_call() -> Callable[..., int] | None:
    """Return process_vm_readv; None where the C library has none. ctypes calls it without the GIL."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        ranges = [ctypes.POINTER(_Range), ctypes.c_ulong]
        function.argtypes = [ctypes.c_int, *ranges, *ranges, ctypes.c_ulong]
        function.restype = ctypes.c_ssize_t
    return function


_readv = _system_call()


def _never() -> bool:
    return False


class Copied:
    """Whether a read has copied all its bytes; true early, while the system call goes on without copying.

    A call that outlives the process whose memory it reads frees that memory before it returns: half a second
    for each GiB. The kernel copies in the order that it is told. So the last byte is copied twice more, into
    two places that differ before; where they are the same, one was written, and all that comes before it.
    """

    def __init__(self) -> None:
        self._places = bytearray(b"\x00\xff")

    def __bool__(self) -> bool:
        return self._places[0] == self._places[1]

    @property
    def address(self) -> int:
        """Where the two places lie."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._places))


class MemoryReader:
    """Reads the memory of one process, and of no other that gets its pid later. Get it from `reader_of`.

    Its pidfd is closed with the last reference: others may be reading.

    Args:
        pid: of the process, which is identified now: by a pidfd, or by its start time without pidfds.

    Attributes:
        pid: as given.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd: int | None = None
        self._started: int | None = None
        try:
            self._pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._started = procfs.start_time(pid)

    def __del__(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)

    def lives(self) -> bool:
        """Whether the process has not ended; a process that got its pid later is another one."""
        if self._pidfd is None:
            return self._started is not None and procfs.start_time(self.pid) == self._started
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)  # readable once the process has ended
        return not poll.poll(0)

    def read(
        self,
        address: int,
        view: memoryview,
        stop: Callable[[], bool] = _never,
        copied: Copied | None = None,
    ) -> bool:
        """Fill `view` from that process's memory; returns whether all of it was read.

        Args:
            address: where the bytes lie there.
            view: writable and contiguous. What it holds is undefined if they were not read.
            stop: called before each 16 MiB; True ends the read.
            copied: for other threads; becomes true once `view` is full, at the latest when this returns True.
        """
        size = view.nbytes
        if not size:
            return True
        if _readv is None or not self.lives():
            return False
        target = ctypes.c_char.from_buffer(view)
        start, done = ctypes.addressof(target), 0
        while done < size:
            if stop():
                return False
            piece = min(size - done, _PIECE)
            here, there = [_Range(start + done, piece)], [_Range(address + done, piece)]
            if copied is not None and done + piece == size:
                here.append(_Range(copied.address, 2))
                there += [_Range(address + size - 1, 1)] * 2
            # Fewer bytes than a piece are read where the rest is not mapped: the next call then fails.
            count = _readv(self.pid, _array(here), len(here), _array(there), len(there), 0)
            if count <= 0:
                reason = os.strerror(ctypes.get_errno())
                _log.debug("the memory of process %d cannot be read: %s", self.pid, reason)
                return False
            done += count
        # If the process ended meanwhile, its pid may have been another's for a part of the bytes.
        return self.lives()


def _array(ranges: list[_Range]) -> ctypes.Array[_Range]:
    return (_Range * len(ranges))(*ranges)


# No lock, which a fork could leave held: two threads that come together for a new pid get a reader each.
_readers: weakref.WeakValueDictionary[int, MemoryReader] = weakref.WeakValueDictionary()


def reader_of(pid: int) -> MemoryReader:
    """Return the reader of the process that has this pid now. While it is used it is the only one of it."""
    reader = _readers.get(pid)
    if reader is None or not reader.lives():
        reader = _readers[pid] = MemoryReader(pid)
    return reader


class Proof:
    """Finds out whether the two ends of a connection can read each other's memory; each end has one.

    Each sends `offer`, then the `answer` to the other's, then whether it `accepts` the answer to its own.
    An end that was accepted may use its `reader`.

    An offer names 16 random bytes in this process, which do not travel: only a process that can read them
    knows them. The answer is a digest of them and of the offer.

    Pid and address are of the other end's choice, and a digest of bytes most of which one knows gives away
    the rest. So the only offer that is answered is of the process that the kernel names at the other end.

    Args:
        peer: pid of that process; None where the kernel names none, as at the end of a TCP connection.

    Attributes:
        reader: of the process whose offer was answered; None if its bytes could not be read.
    """

    def __init__(self, peer: int | None) -> None:
        self.reader: MemoryReader | None = None
        self._peer = peer
        # New for each connection: a process that was forked before has no copy of it.
        self._secret = ctypes.create_string_buffer(secrets.token_bytes(_SECRET_SIZE), _SECRET_SIZE)

    def offer(self) -> bytes:
        """Return where the secret lies; it stays there while this proof exists."""
        return _OFFER.pack(os.getpid(), ctypes.addressof(self._secret), _SECRET_SIZE)

    def answer(self, offer: bytes) -> bytes:
        """Return the digest of the secret that an offer names; zeros if it is not read, or is no offer."""
        self.reader = None
        if len(offer) != OFFER_SIZE:
            return _UNREAD
        pid, address, size = _OFFER.unpack(offer)
        if size != _SECRET_SIZE or pid != self._peer:
            return _UNREAD
        reader, secret = reader_of(pid), bytearray(size)
        if not reader.read(address, memoryview(secret)):
            return _UNREAD
        self.reader = reader
        return _digest(offer, secret)

    def accepts(self, answer: bytes) -> bool:
        """Whether an answer to this end's offer shows that the other end has read the secret."""
        return hmac.compare_digest(answer, _digest(self.offer(), self._secret.raw))


def _digest(offer: bytes, secret: bytes | bytearray) -> bytes:
    return hashlib.sha256(offer + secret).digest()
